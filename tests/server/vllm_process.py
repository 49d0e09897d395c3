"""A server of vLLM for CPU, for tests that compare with it or stand before it. Opt-in, because vLLM
is not a dependency:

    PEGBOARD_TEST_VLLM        Python of an environment with vLLM for CPU
    PEGBOARD_TEST_VLLM_MODEL  directory of a checkpoint in Hugging Face layout that both can load

TCMALLOC may name libtcmalloc_minimal.so.4, which vLLM for CPU requires.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from request_generator import MODEL
from server_process import HTTP, free_port

PYTHON = os.environ.get("PEGBOARD_TEST_VLLM")
CHECKPOINT = os.environ.get("PEGBOARD_TEST_VLLM_MODEL")
START_S = 600.0

needs_vllm = pytest.mark.skipif(
    not (PYTHON and CHECKPOINT), reason="set PEGBOARD_TEST_VLLM and PEGBOARD_TEST_VLLM_MODEL"
)


@contextmanager
def vllm_server(log: Path, *flags: str, **variables: str) -> Iterator[str]:
    """Yields the server's address once it answers. The model is called `MODEL`. variables: of its
    environment."""
    port = free_port()
    stub = log.with_suffix(".stub")
    stub.mkdir()
    write_stub(stub)
    words = [
        "serve",
        str(CHECKPOINT),
        "--port",
        str(port),
        "--served-model-name",
        MODEL,
        "--enforce-eager",
        *flags,
    ]
    with log.open("wb") as out:
        command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", *words]
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env={**environment(stub), **variables},
        )
        try:
            deadline = time.monotonic() + START_S
            while not _answers(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[
                    -5000:
                ]
                time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def environment(stub: Path) -> dict[str, str]:
    """Starts vLLM like tests/bench: all cores bound, and its own OpenMP and tcmalloc loaded
    first."""
    cores = sorted(os.sched_getaffinity(0))
    named = os.environ.get("TCMALLOC")
    tcmalloc = (
        [Path(named)] if named else list(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
    )
    openmp = list(Path(str(PYTHON)).parent.parent.glob("lib/**/libiomp5.so"))[:1]
    return {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(stub),
        "LD_PRELOAD": ":".join(map(str, [*tcmalloc, *openmp])),
    }


def write_stub(folder: Path) -> None:
    """The command `vllm` needs metadata of a distribution called vllm. The one for CPU may have
    another name."""
    asked = (
        "import importlib.metadata as m; print([d.version for d in m.distributions() if d.name in "
        "('vllm', 'vllm-cpu')][0])"
    )
    found = subprocess.run(
        [str(PYTHON), "-c", asked], capture_output=True, text=True, check=True
    ).stdout.strip()
    info = folder / f"vllm-{found.partition('+')[0]}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.partition('+')[0]}+cpu\n"
    )


def _answers(url: str) -> bool:
    try:
        return HTTP.get(url).status_code == 200
    except httpx.TransportError:
        return False
