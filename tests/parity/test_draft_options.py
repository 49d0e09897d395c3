"""Options of speculative decoding, and what a request may say about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draft_heads import HEAD_CONFIG, METHODS, Smaller, proposals, worker_of
from test_drafts import DRAFTS, MIXED, PROMPTS, compare, params, run
from tiny_heads import random_tensor, write_head
from tiny_models import SIZES, VOCAB_SIZE, Reference, divide

from pegboard import LLM
from pegboard.errors import ConfigError, RequestError

WHOLE = {"adaptive_length": False, "num_speculative_tokens": 3}


def config_of(llm: LLM) -> Any:
    return worker_of(llm).config


def test_the_checkpoint_says_the_method(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """And how many tokens it proposes, if it was made for a number."""
    target = write("llama", num_hidden_layers=4)
    rows, size = VOCAB_SIZE, target.model.config.hidden_size
    heads = {f"lm_heads.{head}.weight": random_tensor(rows, size) for head in range(2)}
    blocks = {f"blocks.{head}.layers.0.weight": random_tensor(size, size) for head in range(2)}
    sizes = {"hidden_size": size, "vocab_size": rows, "num_heads": 2, "num_hidden_layers": 1}
    medusa = {**sizes, "architectures": ["MedusaModel"], "model_type": "medusa"}
    named = {
        "medusa": (write_head(tmp_path / "medusa", medusa, {**heads, **blocks}), 2),
        "draft_model": (str(target.directory), 1),
    }
    for method, (model, count) in named.items():
        config: dict[str, Any] = {"model": model}
        if method == "draft_model":
            with pytest.raises(ConfigError, match="'draft_model' can propose any number of tokens"):
                open_llm(target.directory, speculative_config=config)
            config["num_speculative_tokens"] = count
        with open_llm(target.directory, speculative_config=config) as llm:
            assert config_of(llm).spec_method == method and config_of(llm).spec_tokens == count
            run(llm, [params(max_tokens=3)] * len(PROMPTS))
    with pytest.raises(ConfigError, match="'ngram' can propose any number"):
        open_llm(target.directory, speculative_config={"method": "ngram"})
    with pytest.raises(ConfigError, match="spec_model has no effect on the method 'ngram'"):
        open_llm(target.directory, speculative_config={**DRAFTS, "model": named["medusa"][0]})
    with pytest.raises(ConfigError, match="spec_enforce_eager has no effect on the method 'ngram'"):
        open_llm(target.directory, speculative_config={**DRAFTS, "enforce_eager": True})
    nameless = write_head(tmp_path / "nameless", {**HEAD_CONFIG, "architectures": None}, heads)
    with pytest.raises(ConfigError, match="names no architecture, so that the method is not known"):
        open_llm(target.directory, speculative_config={"model": nameless})


@pytest.mark.one_rank
@pytest.mark.parametrize("method", ["itself", "ngram"])
def test_a_request_may_limit_its_drafts(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path, method: str
) -> None:
    target = write("llama")
    config: dict[str, Any] = DRAFTS
    if method == "itself":
        config, _ = METHODS[method](target, write, tmp_path)
    plain = run(open_llm(target.directory), MIXED)
    llm = open_llm(target.directory, speculative_config={**config, **WHOLE})
    limits = [0, None, 1, 2, 7]
    sampling = []
    for each, limit in zip(MIXED, limits, strict=True):
        asked = each.clone()
        asked.extra_args = {"num_speculative_tokens": limit}
        sampling.append(asked)
    with proposals(llm) as pairs:
        compare(run(llm, sampling), plain)
    most = dict.fromkeys(range(len(PROMPTS)), 0)
    for tokens, ids in pairs:
        numbers = [
            number
            for number, prompt in enumerate(PROMPTS)
            if tokens[: len(prompt)] == prompt and len(tokens) > len(prompt)
        ]
        for number in numbers[-1:]:
            most[number] = max(most[number], len(ids))
    assert most[0] == 0 and most[2] <= 1 and most[3] <= 2
    assert max(most.values()) == 3
    for wrong in (-1, 1.5, "2", True, [1]):
        extra = {"num_speculative_tokens": wrong}
        with pytest.raises(RequestError, match="an integer of at least 0 as num_spec") as told:
            run(llm, [params(extra_args=extra)] * len(PROMPTS))
        assert told.value.parameter == "extra_args"
    run(llm, [params(max_tokens=1)] * len(PROMPTS))


@pytest.mark.one_rank
def test_no_drafts_after_the_limit_of_the_draft_model(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """It has a learned position for 24 tokens only. The user may set a lower limit."""
    target = write("llama")
    unset = dict.fromkeys(SIZES)
    sizes = {"n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_inner": 24}
    draft = write("gpt2", "second", **{**unset, **sizes})
    says = Smaller(draft.model)
    plain = run(open_llm(target.directory), MIXED)
    for limit, more in ((24, {}), (11, {"max_model_len": 11})):
        config = {"method": "draft_model", "model": str(draft.directory), **WHOLE, **more}
        llm = open_llm(target.directory, speculative_config=config)
        for _ in range(2):
            with proposals(llm) as pairs:
                compare(run(llm, MIXED), plain)
            lengths = [len(tokens) + len(ids) for tokens, ids in pairs if ids]
            assert max(lengths) == limit and len(pairs) > len(lengths)
            for tokens, ids in pairs[::5]:
                assert ids == says.drafts(tokens, len(ids))


@pytest.mark.parametrize("method", ["itself", "eagle", "eagle3"])
def test_each_rank_may_hold_the_whole_draft_model(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
) -> None:
    target = write("llama", num_hidden_layers=4)
    config, head = METHODS[method](target, write, tmp_path)
    config |= {**WHOLE, "draft_tensor_parallel_size": 1}
    plain = run(open_llm(target.directory), MIXED)
    divide(monkeypatch, 2, 1)
    compare(run(open_llm(target.directory, speculative_config=config), MIXED), plain)
    with pytest.raises(ConfigError, match="spec_tensor_parallel_size=3: expected 1 or .*, 2"):
        open_llm(target.directory, speculative_config={**config, "draft_tensor_parallel_size": 3})


@pytest.mark.one_rank
def test_the_draft_model_may_run_eagerly(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    target = write("llama")
    config, _ = METHODS["itself"](target, write, tmp_path)
    plain = run(open_llm(target.directory, block_size=16), MIXED)
    for is_eager in (True, False):
        spec = {**config, **WHOLE, "enforce_eager": is_eager}
        llm = open_llm(target.directory, block_size=16, speculative_config=spec)
        compare(run(llm, MIXED), plain)
        draft = worker_of(llm).models[1]
        assert (draft.stages.recordings.find("decode", 1) is None) == is_eager
