"""Whole models that are quantized by the producers of checkpoints compute what the producers
compute. Opt-in, because the producers are not dependencies:

    PEGBOARD_TEST_PRODUCERS   Python of an environment with torch, transformers, and any of
    llmcompressor, nvidia-modelopt, auto-round
                              and amd-quark
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pegboard import LLM, SamplingParams
from pegboard.plugins.discovery import scan_path

PYTHON = os.environ.get("PEGBOARD_TEST_PRODUCERS")
PROMPT = [7, 30, 101, 12, 5, 88, 64, 3, 90, 41, 17, 120]
LIMIT = 0.001
"""Of the standard deviation of our differences from the producer, relative to that of the
producer's from the plain model."""
ROUNDED_AGAIN = {
    "auto-round FPW8A16": 0.1,
    "auto-round auto": 0.03,
    "modelopt INT4_AWQ": 1.0,
}
"""Limits of cases whose names begin like this. auto-round stores scales in fewer bits than it
computes with. ModelOpt's export of AWQ changes scales, so some of the stored codes are others; a
wrong layout would differ by more than all rounding does."""


def logprobs_of(model: AutoModelForCausalLM) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return found


@pytest.mark.skipif(not PYTHON, reason="set PEGBOARD_TEST_PRODUCERS")
def test_models_compute_what_their_producers_compute(
    open_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the CPU kernels, which round activations."""
    script = Path(__file__).with_name("quantize_with_producers.py")
    subprocess.run([str(PYTHON), str(script), str(tmp_path)], check=True, cwd=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    unquantized = logprobs_of(model)
    cases = sorted(tmp_path.glob("*.safetensors"))
    assert cases, "no producer is installed"
    exact = {entry.distribution for entry in scan_path(sys.path).entries} - {"pegboard-kernel-cpu"}
    monkeypatch.setenv("PEGBOARD_PLUGINS", ",".join(sorted(exact)))
    wrong = {}
    for case in cases:
        model.load_state_dict(load_file(case))
        expected = logprobs_of(model)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
        settings = {"dtype": "float32", "download_dir": str(tmp_path / "cache")}
        with open_llm(tmp_path / case.stem, **settings) as llm:
            rows = (
                llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[
                    0
                ].prompt_logprobs
                or []
            )
        found = torch.tensor(
            [[row[token].logprob for token in range(128)] for row in rows if row is not None]
        )
        share = float((found - expected).std() / (expected - unquantized).std())
        limit = next(
            (limit for name, limit in ROUNDED_AGAIN.items() if case.stem.startswith(name)), LIMIT
        )
        if share > limit:
            wrong[case.stem] = share
    assert not wrong
