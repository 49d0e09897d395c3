"""Facts that explain the numbers: the machine, its memory bandwidth, and the bytes that a model
reads per token."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

READ_MIB = 512

_BANDWIDTH = f"""
import time, torch
torch.set_num_threads({{threads}})
data = torch.zeros({READ_MIB} * 2**18)
data.sum()
best = 0.0
for _ in range({{times}}):
    started = time.perf_counter()
    data.sum()
    best = max(best, data.nbytes / (time.perf_counter() - started) / 1e9)
print(best)
"""


def read_gb_per_s(times: int) -> float:
    """Measures the bandwidth when all cores read memory at once. It is the best of several sums
    over half a gigabyte, in a separate process."""
    code = _BANDWIDTH.format(threads=len(os.sched_getaffinity(0)), times=times)
    return float(subprocess.check_output([sys.executable, "-c", code]))


def bytes_per_token(model: Path) -> dict[str, int]:
    """Returns the bytes of weights that are read to decode one token alone: {"stored": as in the
    file, "float32": dequantized}. An embedding that is also the head counts once. Any other
    embedding does not count, because it is not read as a whole."""
    from gguf import GGUFReader

    tensors = GGUFReader(model).tensors
    has_head = any(tensor.name == "output.weight" for tensor in tensors)
    read = [tensor for tensor in tensors if not (has_head and tensor.name == "token_embd.weight")]
    return {
        "stored": int(sum(tensor.n_bytes for tensor in read)),
        "float32": int(4 * sum(tensor.n_elements for tensor in read)),
    }


def cpu() -> dict[str, str | int]:
    """Returns the model name of the processor, the number of cores that this process may use, and
    the relevant vector instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in reversed(lines))
    }
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
    flags = [flag for flag in wanted if flag in fields.get("flags", "").split()]
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "flags": " ".join(flags),
        "cores": len(os.sched_getaffinity(0)),
    }
