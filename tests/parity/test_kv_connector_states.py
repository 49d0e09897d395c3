"""KV connectors and models whose layers have states: what is loaded ends where the states are
known, and the tokens are those of an engine without a connector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_drafts import DRAFTS
from test_kv_connectors import PROMPTS, generate, settings
from test_p2p_engines import check
from test_state_parity import ARCHITECTURES, PREEMPTED
from tiny_models import DIVIDED, Reference

from pegboard import LLM
from pegboard.errors import ConfigError

STATES = {"mamba_block_size": 8}
MODELS = {
    "mamba2": ({}, 8),
    "falcon_h1": ({"mamba_d_state": 4}, 12),
    "jamba": ({}, 20),
    "qwen3_next": ({}, 12),
}
"""Changes of the config, so that states are small, and the tokens between two of them, where the
blocks of attention end."""
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 16},
    "whole prompts": {"max_num_batched_tokens": 160, "enable_chunked_prefill": False},
    "drafts": {"speculative_config": DRAFTS},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"max_model_len": 58},
}


def folder(write: Callable[..., Reference], name: str) -> Path:
    model_type, config = ARCHITECTURES[name]
    return write(model_type, **{**config, **MODELS[name][0]}).directory


def loadable(name: str, prompt: list[int]) -> int:
    """Return how many tokens of a prompt can be loaded."""
    every = MODELS[name][1]
    return (len(prompt) - 1) // every * every


@pytest.mark.sampled(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_states_outlive_an_engine(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    name: str,
    engine: str,
) -> None:
    directory = folder(write, name)
    chosen = {**STATES, **ENGINES[engine]}
    if engine == "preempted":
        chosen["num_gpu_blocks_override"] = PREEMPTED.get(name, 12)
    with open_llm(directory, **STATES) as llm:
        expected, _ = generate(llm, PROMPTS)
    connected = {**chosen, **settings(tmp_path / "kv")}
    with open_llm(directory, **connected) as llm:
        assert generate(llm, PROMPTS)[0] == expected
        num_preempted = llm.llm_engine.engine.stats()["num_preemptions_total"]
        # states alone never grow
        assert bool(num_preempted) == (engine == "preempted" and name != "mamba2") or DIVIDED
    is_whole = engine not in ("preempted", "no prefix cache") and not DIVIDED
    with open_llm(directory, **connected) as llm:
        tokens, num_saved = generate(llm, PROMPTS)
        assert tokens == expected
        most = sum(loadable(name, prompt) for prompt in PROMPTS)
        assert num_saved == most or most > num_saved > 0 and not is_whole
        answers = [[*prompt, *output, 7] for prompt, output in zip(PROMPTS, expected, strict=True)]
        tokens, _ = generate(llm, answers)
    with open_llm(directory, **STATES) as llm:
        assert generate(llm, answers)[0] == tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_evicted_states_come_back(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], name: str
) -> None:
    directory = folder(write, name)
    prompts = [[start, *range(4 + start, 40 + start)] for start in range(8)]
    few = {**STATES, "num_gpu_blocks_override": 16, "max_model_len": 56, "max_num_seqs": 2}
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"num_cpu_blocks": 200},
    }
    with open_llm(directory, **STATES) as llm:
        expected, _ = generate(llm, prompts)
    with open_llm(directory, **few, kv_transfer_config=offload) as llm:
        for turn in range(3):
            tokens, num_saved = generate(llm, prompts)
            assert tokens == expected
            assert num_saved == 8 * loadable(name, prompts[0]) or not turn


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("mamba2", {}),
        pytest.param("falcon_h1", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"speculative_config": DRAFTS}, marks=pytest.mark.slow),
        pytest.param("falcon_h1", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("jamba", {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_states_come_from_another_engine(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], name: str, engine: dict[str, Any]
) -> None:
    directory = folder(write, name)
    check(open_llm, directory, {**STATES, **engine}, "P2pNcclConnector", MODELS[name][1])


def test_made_up_states_are_refused(
    write: Callable[..., Reference], open_llm: Callable[..., LLM]
) -> None:
    directory = folder(write, "mamba2")
    with pytest.raises(ConfigError, match="states, which the KV connector decode_bench cannot"):
        open_llm(directory, kv_connectors=["decode_bench"])
