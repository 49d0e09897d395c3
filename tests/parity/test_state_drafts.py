"""Speculative decoding with models whose layers have states: the state is that of the tokens that
were accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draft_heads import METHODS
from test_drafts import DRAFTS, MIXED, PROMPTS, compare, params, run
from test_state_parity import ARCHITECTURES
from tiny_models import DIVIDED, Reference, divide, nightly

from pegboard import LLM
from pegboard.errors import ConfigError

NAMES = ("mamba", "mamba2", "jamba", "lfm2", "falcon_h1", "qwen3_next", "minimax")
STATES: dict[str, Any] = {"mamba_block_size": 8}
ENGINES: dict[str, dict[str, Any]] = {
    "recorded": {"mamba_block_size": 16, "block_size": 16},
    "eager": {**STATES, "enforce_eager": True},
    "chunked": {**STATES, "max_num_batched_tokens": 8, "max_num_seqs": 4},
    "no prefixes": {**STATES, "enable_prefix_caching": False},
}


def metric(llm: LLM, name: str) -> Any:
    return next(each.value for each in llm.get_metrics() if each.name == f"vllm:{name}")


def check(llm: LLM, plain: list[Any]) -> None:
    """Twice, because the prefix cache then has states of the first time."""
    for _ in range(2):
        compare(run(llm, MIXED), plain)
    run(llm, [params(allowed_token_ids=[7])] * len(PROMPTS))  # whose drafts are right
    proposed, accepted = (
        metric(llm, f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")
    )
    assert 0 < accepted < proposed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", nightly(ENGINES, "no prefixes"))
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_plain_decoding(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], name: str, engine: str
) -> None:
    model_type, config = ARCHITECTURES[name]
    target = write(model_type, **config).directory
    plain = run(open_llm(target, **ENGINES[engine]), MIXED)
    check(
        open_llm(target, speculative_config=DRAFTS, disable_log_stats=False, **ENGINES[engine]),
        plain,
    )


@pytest.mark.parametrize(("name", "num_blocks"), [("falcon_h1", 11), ("qwen3_next", 22)])
def test_requests_that_are_preempted(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], name: str, num_blocks: int
) -> None:
    model_type, config = ARCHITECTURES[name]
    target = write(model_type, **config).directory
    plain = run(open_llm(target, **STATES), MIXED)
    few = {**STATES, "num_gpu_blocks_override": num_blocks, "max_model_len": 56}
    llm = open_llm(target, speculative_config=DRAFTS, disable_log_stats=False, **few)
    check(llm, plain)
    assert metric(llm, "num_preemptions") > 0 or DIVIDED


@pytest.mark.one_rank
def test_a_draft_model(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """It keeps the keys of the tokens that are computed again. It may not have states itself."""
    model_type, config = ARCHITECTURES["qwen3_next"]
    target = write(model_type, "target", **config)
    plain = run(open_llm(target.directory, **STATES), MIXED)
    drafting, _ = METHODS["its own KV groups"](target, write, tmp_path)
    drafting |= {"num_speculative_tokens": 3, "adaptive_length": False}
    llm = open_llm(target.directory, speculative_config=drafting, disable_log_stats=False, **STATES)
    check(llm, plain)
    with pytest.raises(ConfigError, match="layers with states, and a draft model may have only"):
        open_llm(target.directory, speculative_config={**drafting, "model": str(target.directory)})


@pytest.mark.one_rank
def test_no_block_is_lost(write: Callable[..., Reference], open_llm: Callable[..., LLM]) -> None:
    model_type, config = ARCHITECTURES["mamba2"]
    target = write(model_type, **config).directory
    llm = open_llm(target, speculative_config=DRAFTS, disable_log_stats=False, **STATES)
    for _ in range(3):
        run(llm, MIXED)
        assert metric(llm, "kv_cache_usage_perc") == 0
    engine = llm.llm_engine
    request_id = engine.add_request("gone", {"prompt_token_ids": PROMPTS[0]}, MIXED[0])
    for _ in range(4):
        engine.step()
    engine.abort_request([request_id or "gone"])
    run(llm, MIXED)
    assert metric(llm, "kv_cache_usage_perc") == 0


@pytest.mark.one_rank
def test_pipeline_stages_are_refused(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_type, config = ARCHITECTURES["mamba2"]
    target = write(model_type, **config).directory
    divide(monkeypatch, 1, 2)
    with pytest.raises(ConfigError, match="set pipeline_parallel_size to 1, or remove spec_method"):
        open_llm(target, speculative_config=DRAFTS)
