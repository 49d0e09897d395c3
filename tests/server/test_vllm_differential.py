"""The same requests to `vllm serve` and to Pegboard, on the same weights in float32. Opt-in,
because vLLM is not a dependency:

    PEGBOARD_TEST_VLLM        Python of an environment with vLLM for CPU
    PEGBOARD_TEST_VLLM_MODEL  directory of a checkpoint in Hugging Face layout that both can load
    PEGBOARD_TEST_VLLM_REQUESTS   number of requests (default 300)

TCMALLOC may name libtcmalloc_minimal.so.4, which vLLM for CPU requires. Every difference that
`compare_answers.KNOWN` does not explain is a failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from compare_answers import KNOWN, Answer, ask, differences
from request_generator import MODEL, Case, generate
from server_process import HTTP, Server, free_port

PYTHON = os.environ.get("PEGBOARD_TEST_VLLM")
CHECKPOINT = os.environ.get("PEGBOARD_TEST_VLLM_MODEL")
NUM_REQUESTS = int(os.environ.get("PEGBOARD_TEST_VLLM_REQUESTS", "300"))
START_S = 600.0
SAME = (
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "8",
    "--enable-prompt-tokens-details",
)

needs_vllm = pytest.mark.skipif(
    not (PYTHON and CHECKPOINT), reason="set PEGBOARD_TEST_VLLM and PEGBOARD_TEST_VLLM_MODEL"
)


@contextmanager
def vllm_server(log: Path) -> Iterator[str]:
    """Yields the server's address once it answers."""
    port = free_port()
    stub = log.parent / "stub"
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
        *SAME,
    ]
    with log.open("wb") as out:
        command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", *words]
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment(stub)
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


def answers_of(url: str, cases: list[Case]) -> list[Answer]:
    with httpx.Client(timeout=300) as client:
        return [ask(url, case, client) for case in cases]


@needs_vllm
def test_both_answer_alike(tmp_path: Path) -> None:
    cases = generate(NUM_REQUESTS)
    # one after the other, so that both run on idle cores
    with vllm_server(tmp_path / "vllm.log") as url:
        theirs = answers_of(url, cases)
    with Server(Path(str(CHECKPOINT)), tmp_path, *SAME) as server:
        ours = answers_of(server.wait_until_ready().url, cases)
    found = [
        f"{case.method} {case.path} {case.content!r}\n    {difference}"
        for case, here, there in zip(cases, ours, theirs, strict=True)
        for difference in differences(case, here, there)
    ]
    assert not found, f"{len(found)} differences:\n" + "\n".join(found)


def test_known_differences_are_documented() -> None:
    """Compares row by row. docs/vllm.md tells readers about the differences that `KNOWN` allows."""
    text = (Path(__file__).parents[2] / "docs/vllm.md").read_text("utf-8")
    section = text.partition("## Answers, compared with vLLM's")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \|", section, re.M)[1:]
    assert rows == [known.name for known in KNOWN]


def test_requests_are_the_same_every_time_and_touch_every_field() -> None:
    assert generate(300) == generate(300)
    cases = generate(900)
    assert {case.path for case in cases} >= {
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    }
    assert len({name for case in cases for name in case.changed}) > 50
