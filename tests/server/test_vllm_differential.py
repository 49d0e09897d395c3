"""The same requests to `vllm serve` and to Pegboard, on the same weights in float32. Opt-in: see
vllm_process.py. PEGBOARD_TEST_VLLM_REQUESTS is the number of requests (default 300).

Every difference that `compare_answers.KNOWN` does not explain is a failure.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx
from compare_answers import KNOWN, Answer, ask, differences
from request_generator import Case, generate
from server_process import Server
from vllm_process import CHECKPOINT, needs_vllm, vllm_server

NUM_REQUESTS = int(os.environ.get("PEGBOARD_TEST_VLLM_REQUESTS", "300"))
SAME = (
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "8",
    "--enable-prompt-tokens-details",
)


def answers_of(url: str, cases: list[Case]) -> list[Answer]:
    with httpx.Client(timeout=300) as client:
        return [ask(url, case, client) for case in cases]


@needs_vllm
def test_both_answer_alike(tmp_path: Path) -> None:
    cases = generate(NUM_REQUESTS)
    # one after the other, so that both run on idle cores
    with vllm_server(tmp_path / "vllm.log", *SAME) as url:
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
