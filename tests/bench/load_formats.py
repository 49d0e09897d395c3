"""Times the load formats that read safetensors files: the tensors of a checkpoint with random
weights are read and copied once, as layers do.

    python tests/bench/load_formats.py [--gigabytes 4] [--folder /tmp] [--runs 3]

It prints a table of medians, with a cold page cache (only as root, which may drop it) and a warm
one. The checkpoint is deleted afterwards. Formats whose library is not installed are left out.

With PEGBOARD_PEER_VLLM, the Python of an environment with vLLM (CPU), vLLM's own loader reads the
checkpoint too, in a process of its own that has started before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import WantedWeight, WeightLoaderSetup

ROWS = 4096
COLUMNS = 8192
FILES = 4
LOADERS = {
    "safetensors": ("pegboard_weight_loader_safetensors.loader:SafetensorsLoader", "safetensors"),
    "fastsafetensors": (
        "pegboard_weight_loader_fastsafetensors.loader:FastSafetensorsLoader",
        "fastsafetensors",
    ),
    "runai_streamer": (
        "pegboard_weight_loader_runai_streamer.loader:StreamerLoader",
        "runai_model_streamer",
    ),
}
"""Load format → its loader, and the library that it needs."""
PEER = os.environ.get("PEGBOARD_PEER_VLLM")
CACHES = Path("/proc/sys/vm/drop_caches")


def write(folder: Path, gigabytes: float) -> None:
    """Write shards of bfloat16 matrices, and a config."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": COLUMNS}
    (folder / "config.json").write_text(json.dumps(config))
    count = max(FILES, round(gigabytes * 1e9 / (ROWS * COLUMNS * 2)))
    weight_map = {}
    for index in range(FILES):
        file = f"model-{index + 1:05}-of-{FILES:05}.safetensors"
        names = [f"model.layers.{number}.weight" for number in range(index, count, FILES)]
        save_file(
            {name: torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16) for name in names},
            folder / file,
        )
        weight_map |= dict.fromkeys(names, file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))


def readers(folder: Path) -> dict[str, Callable[[], None]]:
    """Return what is timed, by name."""
    target = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    target.zero_()

    def with_loader(address: str) -> None:
        module, _, name = address.partition(":")
        loader = getattr(import_module(module), name)(None, WeightLoaderSetup())
        checkpoint = loader.describe(LocalFiles(folder))
        wanted = [WantedWeight(name) for name in checkpoint.tensors]
        for piece in loader.tensors(checkpoint, wanted):
            target.copy_(piece.data)

    def with_library() -> None:
        for path in sorted(folder.glob("*.safetensors")):
            for value in load_file(path).values():
                target.copy_(value)

    chosen: dict[str, Callable[[], None]] = {
        name: lambda address=address: with_loader(address)  # type: ignore[misc]
        for name, (address, library) in LOADERS.items()
        if find_spec(library) is not None
    }
    return {**chosen, "safetensors' load_file": with_library}


@contextmanager
def vllm_reader(folder: Path) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield the reader that is a process of vLLM, by its name and version; {} without one."""
    if not PEER:
        yield {}
        return
    script = Path(__file__).with_name("read_with_vllm.py")
    with subprocess.Popen(
        [PEER, str(script), str(folder), str(ROWS), str(COLUMNS)],
        env={**os.environ, "PYTHONPATH": "", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        commands = peer.stdin
        answers = peer.stdout
        version = answers.readline().strip()

        def read() -> None:
            commands.write("\n")
            commands.flush()
            if answers.readline() != "done\n":
                raise RuntimeError("vLLM's process has ended")

        yield {f"vLLM {version}'s loader": read} if version else {}
        commands.close()


def seconds(read: Callable[[], None], folder: Path, *, is_cold: bool) -> float:
    if is_cold:
        os.sync()
        CACHES.write_text("3")
    else:
        for path in folder.glob("*.safetensors"):
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass
    start = time.perf_counter()
    read()
    return time.perf_counter() - start


def measure(
    readings: dict[str, Callable[[], None]], folder: Path, runs: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds by name, with a cold and with a warm page cache. Each run has all readers,
    in turn in this order and the other one, because the machine is not equally fast all the
    time."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in readings}
    for run in range(runs):
        for name in list(readings)[:: 1 if run % 2 == 0 else -1]:
            cold, warm = times[name]
            if os.access(CACHES, os.W_OK):
                cold.append(seconds(readings[name], folder, is_cold=True))
            warm.append(seconds(readings[name], folder, is_cold=False))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        write(folder, args.gigabytes)
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{num_bytes / 1e9:.1f} GB, {os.cpu_count()} CPUs, medians of {args.runs}, seconds")
        print("| load format | cold page cache | warm page cache |\n|---|---|---|")
        with vllm_reader(folder) as peer:
            times = measure({**readers(folder), **peer}, folder, args.runs)
        for name, (cold, warm) in times.items():
            cells = (
                f"{statistics.median(some):.2f}" if some else "not measured"
                for some in (cold, warm)
            )
            print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
