"""The method `medusa`: the output is that without drafts, and the proposals are those of a head in
plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_heads import (
    ENGINES,
    SIZE,
    Head,
    check_method,
    check_proposals,
    counting_target,
    drafting,
    following,
    greedy,
    metric,
    random_tensor,
    watch,
    write_head,
)
from tiny_models import VOCAB_SIZE, Reference, divide
from torch import Tensor

from pegboard import LLM
from pegboard.errors import ConfigError, ModelError

NUM_HEADS = 3
PART = 64
CONFIG = {
    "model_type": "medusa",
    "architectures": ["MedusaModel"],
    "hidden_size": SIZE,
    "vocab_size": VOCAB_SIZE,
    "num_heads": NUM_HEADS,
    "num_hidden_layers": 2,
}


def blocks(has_bias: bool = False) -> dict[str, Tensor]:
    """The blocks of all heads, two in each."""
    paths = [f"blocks.{head}.layers.{layer}" for head in range(NUM_HEADS) for layer in range(2)]
    weights = {f"{path}.weight": random_tensor(SIZE, SIZE) * 2 for path in paths}
    biases = {f"{path}.bias": random_tensor(SIZE) * 4 for path in paths if has_bias}
    return {**weights, **biases}


def lm_heads(rows: int = VOCAB_SIZE) -> dict[str, Tensor]:
    return {f"lm_heads.{head}.weight": random_tensor(rows, SIZE) for head in range(NUM_HEADS)}


def old_name(name: str) -> str:
    """The name in FasterDecoding/Medusa, of heads that are a part of a whole."""
    kind, head, *rest = name.split(".")
    if kind == "lm_heads":
        return f"medusa_heads.{head}.2.{rest[-1]}"
    return f"medusa_heads.{head}.{rest[1]}.linear.{rest[-1]}"


def case(name: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return the config of a head, its tensors, and the same with vLLM's names for all heads."""
    torch.manual_seed(5)
    if name == "old layout":
        tensors = {**blocks(has_bias=True), **lm_heads()}
        config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 2}
        return config, {old_name(key): each for key, each in tensors.items()}, tensors
    token_map = {"token_map": torch.randperm(VOCAB_SIZE)[:PART]}
    if name == "truncated":
        tensors = {**blocks(), **lm_heads(PART), **token_map}
        return {**CONFIG, "truncated_vocab_size": PART}, tensors, tensors
    if name == "truncated, whole heads":
        tensors = {**blocks(), **lm_heads(), **token_map}
        return {**CONFIG, "truncated_vocab_size": PART}, tensors, tensors
    if name == "shared":
        shared = random_tensor(VOCAB_SIZE, SIZE)
        tensors = {**blocks(), "lm_head.weight": shared}
        same = {f"lm_heads.{head}.weight": shared for head in range(NUM_HEADS)}
        return {**CONFIG, "original_lm_head": True}, tensors, {**blocks_of(tensors), **same}
    if name == "the target's":
        tensors = blocks()
        return {**CONFIG, "original_lm_head": True}, tensors, tensors
    tensors = {**blocks(), **lm_heads()}
    return CONFIG, tensors, tensors


def blocks_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if name.startswith("blocks.")}


def plain_head(tensors: dict[str, Tensor], reference: Reference) -> Head:
    """The heads in plain torch."""

    def compute(hidden: Tensor, last_id: int) -> list[Tensor]:
        every = []
        for head in range(NUM_HEADS):
            state = hidden
            for layer in range(2):
                path = f"blocks.{head}.layers.{layer}"
                product = tensors[f"{path}.weight"] @ state + tensors.get(f"{path}.bias", 0.0)
                state = state + product * product.sigmoid()
            shared = reference.model.lm_head.weight
            logits = tensors.get(f"lm_heads.{head}.weight", shared) @ state
            if (ids := tensors.get("token_map")) is not None:
                known = logits if len(logits) == PART else logits[ids]
                logits = torch.full((VOCAB_SIZE,), -torch.inf).index_copy(0, ids, known)
            every.append(logits)
        return every

    return compute


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_output_is_that_without_drafts(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path, engine: Any
) -> None:
    config, tensors, _ = case("plain")
    settings = drafting("medusa", write_head(tmp_path / "head", config, tensors))
    check_method(write("llama"), open_llm, settings, engine)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("plain", "recorded"),
        ("plain", "chunked"),
        ("plain", "preempted"),
        ("old layout", "eager"),
        ("truncated", "recorded"),
        ("truncated, whole heads", "recorded"),
        ("shared", "eager"),
        ("the target's", "recorded"),
    ],
)
def test_proposals_are_those_of_the_heads(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    name: str,
    engine: str,
) -> None:
    reference = write("llama")
    config, tensors, same = case(name)
    settings = drafting("medusa", write_head(tmp_path / "head", config, tensors))
    llm = open_llm(reference.directory, **settings, **ENGINES[engine])
    proposals = watch(llm)
    greedy(llm)
    check_proposals(reference, plain_head(same, reference), proposals, NUM_HEADS)


def test_heads_that_are_right(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Also with more drafts than heads, and with a length that adapts."""
    reference = write("llama")
    rows = counting_target(reference)
    tensors = {
        **{name: torch.zeros_like(each) for name, each in blocks().items()},
        **{f"lm_heads.{head}.weight": following(rows, head + 2) for head in range(NUM_HEADS)},
    }
    folder = write_head(tmp_path / "head", CONFIG, tensors)
    plain = greedy(open_llm(reference.directory))
    for more in ({}, {"num_speculative_tokens": 5}, {"adaptive_length": True}):
        llm = open_llm(reference.directory, **drafting("medusa", folder, **more))
        assert greedy(llm) == plain
        assert metric(llm, "accepted_tokens") > 0.9 * metric(llm, "draft_tokens") > 0


def test_two_ranks(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = write("llama")
    rows = counting_target(reference)
    heads = {f"lm_heads.{head}.weight": following(rows, head + 2) for head in range(NUM_HEADS)}
    still = {name: torch.zeros_like(each) for name, each in blocks().items()}
    right = write_head(tmp_path / "right", CONFIG, {**still, **heads})
    config, tensors, same = case("truncated")
    random = write_head(tmp_path / "random", config, tensors)
    plain = greedy(open_llm(reference.directory))
    divide(monkeypatch, 2, 1)
    llm = open_llm(reference.directory, **drafting("medusa", right))
    assert greedy(llm) == plain
    assert metric(llm, "accepted_tokens") > 0.9 * metric(llm, "draft_tokens") > 0
    llm = open_llm(reference.directory, **drafting("medusa", random))
    proposals = watch(llm)
    assert greedy(llm) == plain
    check_proposals(reference, plain_head(same, reference), proposals, NUM_HEADS)


def test_heads_that_do_not_fit(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    reference = write("llama")
    config, tensors, _ = case("truncated")

    def refused(name: str, config: Any, tensors: dict[str, Tensor], words: str) -> None:
        folder = write_head(tmp_path / name, config, tensors)
        with pytest.raises(ModelError, match=words):
            open_llm(reference.directory, **drafting("medusa", folder))

    with pytest.raises(ConfigError, match="needs a head: set spec_model"):
        open_llm(reference.directory, **drafting("medusa", None))
    refused("size", {**config, "hidden_size": 48}, tensors, "hidden states of size 48, .* has 32")
    few = {name: each for name, each in tensors.items() if not name.startswith("lm_heads.2")}
    refused("few", config, few, "lm_heads.2.weight")
    whole = {**tensors, "token_map": torch.arange(PART) + VOCAB_SIZE - PART + 1}
    refused("ids", config, whole, f"from {VOCAB_SIZE - PART + 1} to {VOCAB_SIZE}; expected ids")
    wide = {**tensors, "blocks.1.layers.1.weight": random_tensor(SIZE, 48)}
    refused("wide", config, wide, "blocks.1.layers.1.weight")
