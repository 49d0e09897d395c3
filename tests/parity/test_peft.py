"""Adapters that the package peft writes give the logits that it computes. Opt-in, because peft is
not a dependency:

PEGBOARD_TEST_PEFT   Python of an environment with torch, transformers, safetensors and peft
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pegboard import LLM, LoRARequest, SamplingParams

PYTHON = os.environ.get("PEGBOARD_TEST_PEFT")
TOLERANCE = 1e-4
PARAMS = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)


@pytest.mark.skipif(not PYTHON, reason="set PEGBOARD_TEST_PEFT")
def test_the_logits_of_peft(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    script = Path(__file__).with_name("write_with_peft.py")
    subprocess.run([str(PYTHON), str(script), str(tmp_path)], check=True)
    folders = sorted(path.parent for path in tmp_path.glob("*/expected.safetensors"))
    assert folders
    wrong = [told for folder in folders if (told := difference(open_llm, folder))]
    assert not wrong, "\n".join(wrong)


def difference(open_llm: Callable[..., LLM], folder: Path) -> str:
    """Return how far the model in a folder is from peft, with the adapter or without, or "" if it
    is near."""
    expected = load_file(folder / "expected.safetensors")
    prompt = {"prompt_token_ids": expected["tokens"].tolist()}
    lora = LoRARequest("a", 1, str(folder / "adapter"))
    with open_llm(folder / "model", enable_lora=True, max_lora_rank=8) as llm:
        outputs = llm.generate([prompt, prompt], PARAMS, lora_request=[None, lora], use_tqdm=False)
    worst: dict[str, Any] = {}
    for name, output in zip(("base", "adapter"), outputs, strict=True):
        found = torch.tensor(
            [[row[token].logprob for token in sorted(row)] for row in output.prompt_logprobs[1:]]
        )
        worst[name] = (found - expected[name][: len(found)]).abs().max().item()
    assert (expected["base"] - expected["adapter"]).abs().max() > 100 * TOLERANCE, (
        f"{folder.name}: the adapter changes nothing"
    )
    return f"{folder.name}: off by {worst}" if max(worst.values()) > TOLERANCE else ""
