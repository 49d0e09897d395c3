"""Functions see the prompt and the outputs of their request, alone and in a batch, with drafts and
preempted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_logits_processor_per_request.options import PerRequestOptions
from pegboard_logits_processor_per_request.processor import PerRequestProcessor
from torch import Tensor

from pegboard import LLM, SamplingParams
from pegboard.errors import ConfigError
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_testing.contract_logits_processor import VOCABULARY, LogitsProcessorContract
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.tiny_engine import CONFIG, PROMPTS

HERE = f"{__name__}:"
number = 3


def make(params: SamplingParams) -> Callable[..., Any] | None:
    """Forbid what was said before. The form of the function depends on the request."""
    form = (params.extra_args or {}).get("form")
    if form == 2:
        return lambda outputs, logits: logits.index_fill(
            0, torch.tensor(outputs, dtype=torch.int64), -torch.inf
        )
    if form == 3:

        def all_said(prompt: list[int], outputs: list[int], logits: Tensor) -> Tensor:
            return logits.index_fill_(0, torch.tensor(prompt + outputs), -torch.inf)

        return all_said
    wrong: dict[Any, Any] = {
        "number": number,
        "wide": lambda one: one,
        "none": lambda outputs, logits: None,
    }
    return wrong.get(form)


class TestPerRequest(LogitsProcessorContract):
    name = "per_request"
    options = {"make": HERE + "make"}
    requests = ({}, {"form": 2}, {"form": 3})


def processor(path: str) -> PerRequestProcessor:
    return PerRequestProcessor(
        PerRequestOptions(make=path), LogitsProcessorSetup(fake_limits(), "cpu", lambda: VOCABULARY)
    )


def asking(form: object) -> SamplingParams:
    extra = None if form is None else {"form": form}
    return SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args=extra
    )


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_engine_calls_it(tmp_path: Path, drafts: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    speculative = {"spec_method": "ngram", "spec_tokens": drafts} if drafts else {}
    options: dict[str, Any] = {
        "plugin_options": {"logits_processor.per_request": {"make": HERE + "make"}},
        **speculative,
    }
    own: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 64,
    }
    with LLM(str(tmp_path), logits_processors=["per_request"], **own, **options) as llm:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = [
            each.outputs[0].token_ids
            for each in llm.generate(prompts, [asking(2), asking(3), asking(None)], use_tqdm=False)
        ]
        alone = [
            llm.generate(prompts[i], asking(form), use_tqdm=False)[0].outputs[0].token_ids
            for i, form in enumerate((2, 3, None))
        ]
    assert found == alone
    assert len(set(found[0])) == 8, "no token twice"
    assert len({*found[1], *PROMPTS[1]}) == 8 + len(set(PROMPTS[1])), "and none of the prompt"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:make", "cannot be imported: No module named"),
        (HERE + "nothing", "cannot be imported: .*nothing"),
        (HERE + "number", "is 3, expected a function"),
    ],
)
def test_a_wrong_path_is_explained(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor(path)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("number", "returned 3, expected a function or None"),
        ("wide", "with 1 arguments"),
        ("none", "returned a NoneType, expected"),
    ],
)
def test_a_wrong_function_is_explained(form: str, message: str) -> None:
    chosen = processor(HERE + "make")
    none = np.array([], int)
    with pytest.raises(TypeError, match=message):
        chosen.update([AddedRow(0, asking(form), np.array([1]), none)], none)
        chosen.apply(torch.zeros(1, 4), torch.tensor([0]), torch.tensor([0]), lambda: [[]])
