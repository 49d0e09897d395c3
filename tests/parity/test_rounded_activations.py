"""Checkpoints that ask for activations in 8 bits (W8A8) give the logits of a model whose
activations are rounded by torch, if the user wants it, and a line of the log says what computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_layouts import ROUNDED, quantize, round_inputs
from test_stored_formats import check_logits
from tiny_models import Reference

from pegboard import LLM, SamplingParams

SIZES = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
PROMPTS = [[3 + i, 40 + 5 * i, 101 - i] for i in range(12)]
PARAMS = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, detokenize=False)


def near(llm: LLM, reference: Reference, count: int) -> float:
    """Return the share of short prompts whose logprobs are those of the reference. A code may be
    the next one where float32 decides, which changes all that follows."""
    prompts = PROMPTS[:count]
    equal = 0
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        (row,) = output.outputs[0].logprobs or ()
        values = torch.tensor([row[token].logprob for token in sorted(row)])
        equal += bool((values - reference.logprobs(prompt)[-1]).abs().max() < 1e-4)
    return equal / count


def check_rounded(reference: Reference, llm: LLM, case: str, count: int = len(PROMPTS)) -> None:
    """The engine rounds what the layers multiply as the case asks, and no other way."""
    assert near(llm, reference, count) == 0
    round_inputs(reference, case)
    assert near(llm, reference, count) >= 0.6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ROUNDED)
def test_the_logits_of_rounded_activations(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    case: str,
) -> None:
    caplog.set_level("INFO", "pegboard")
    reference = write("llama", **SIZES)
    quantize(reference, case)
    settings: dict[str, Any] = {"download_dir": str(tmp_path / "cache"), "block_size": 16}
    with open_llm(reference.directory, activation_quantization="checkpoint", **settings) as llm:
        check_rounded(reference, llm, case)
    assert "activations are rounded to" in caplog.text
    if case.startswith("int8"):
        assert "eagerly" not in caplog.text and "not replayed" not in caplog.text


@pytest.mark.parametrize("case", ["int8 per token", "static fp8"])
def test_the_default_is_more_exact(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    case: str,
) -> None:
    """No kernel for CPUs is faster with the rounding that a checkpoint asks for by so much that it
    would be worth its error."""
    caplog.set_level("INFO", "pegboard")
    reference = write("llama", **SIZES)
    quantize(reference, case)
    with open_llm(reference.directory, download_dir=str(tmp_path / "cache"), block_size=16) as llm:
        check_logits(llm, reference, 0.05)
    assert "activations are not rounded to" in caplog.text
