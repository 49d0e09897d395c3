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
    NUM_DRAFTS,
    SIZE,
    Head,
    check_method,
    check_plain_proposals,
    check_refusals,
    check_right_head,
    check_two_ranks,
    counting_target,
    drafting,
    following,
    random_tensor,
    write_head,
)
from tiny_models import VOCAB_SIZE, Reference
from torch import Tensor

from pegboard import LLM

NUM_HEADS = NUM_DRAFTS
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_output_is_that_without_drafts(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path, engine: Any
) -> None:
    config, tensors, _ = case("plain")
    settings = drafting("medusa", write_head(tmp_path / "head", config, tensors))
    check_method(write("llama"), open_llm, settings, engine)


@pytest.mark.sampled(2)
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
    head = plain_head(same, reference)
    check_plain_proposals(reference, open_llm, settings, engine, head)


def right_heads(reference: Reference, folder: Path) -> str:
    """Write heads that say what follows, and let the target do so too. Returns the folder."""
    rows = counting_target(reference)
    still = {name: torch.zeros_like(each) for name, each in blocks().items()}
    heads = {f"lm_heads.{head}.weight": following(rows, head + 2) for head in range(NUM_HEADS)}
    return write_head(folder, CONFIG, {**still, **heads})


def test_heads_that_are_right(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    reference = write("llama")
    right = right_heads(reference, tmp_path / "right")
    check_right_head(reference, open_llm, "medusa", right)


def test_two_ranks(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = write("llama")
    right = right_heads(reference, tmp_path / "right")
    config, tensors, same = case("truncated")
    random = write_head(tmp_path / "random", config, tensors), plain_head(same, reference)
    check_two_ranks(monkeypatch, reference, open_llm, "medusa", right, random)


def test_heads_that_do_not_fit(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    config, tensors, _ = case("truncated")
    few = {name: each for name, each in tensors.items() if not name.startswith("lm_heads.2")}
    first = VOCAB_SIZE - PART + 1
    beyond = {**tensors, "token_map": torch.arange(first, VOCAB_SIZE + 1)}
    wide = {**tensors, "blocks.1.layers.1.weight": random_tensor(SIZE, 48)}
    heads = {
        "hidden states of size 48, .* has 32": ({**config, "hidden_size": 48}, tensors),
        "lm_heads.2.weight": (config, few),
        f"from {first} to {VOCAB_SIZE}; expected ids": (config, beyond),
        "blocks.1.layers.1.weight": (config, wide),
    }
    check_refusals(write("llama"), open_llm, "medusa", tmp_path, heads)
