"""The method `mlp_speculator`: the output is that without drafts, and the proposals are those of a
speculator in plain torch."""

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
    random_tensor,
    speculator_of_next,
    write_head,
)
from tiny_models import VOCAB_SIZE, Reference
from torch import Tensor
from torch.nn import functional

from pegboard import LLM

NUM_STAGES = NUM_DRAFTS
INNER = 24
CONFIG = {
    "model_type": "mlp_speculator",
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "vocab_size": VOCAB_SIZE,
    "emb_dim": SIZE,
    "inner_dim": INNER,
    "n_predict": NUM_STAGES,
    "tie_weights": False,
    "scale_input": False,
}
TIED = {"emb": 1, "ln": 1, "proj": 2, "head": 1}
"""How many of each module a tied speculator has."""


def speculator(counts: dict[str, int] | None = None, inner: int = INNER) -> dict[str, Tensor]:
    """The tensors of a speculator. counts: how many of each module; None = one for each stage."""
    torch.manual_seed(6)
    numbers = counts or dict.fromkeys(TIED, NUM_STAGES)
    tensors = {}
    for stage in range(numbers["emb"]):
        tensors[f"emb.{stage}.weight"] = random_tensor(VOCAB_SIZE, inner) * 4
        tensors[f"ln.{stage}.weight"] = 1 + random_tensor(inner)
        tensors[f"ln.{stage}.bias"] = random_tensor(inner)
    for stage in range(numbers["proj"]):
        tensors[f"proj.{stage}.weight"] = random_tensor(inner, inner if stage else SIZE)
    for stage in range(numbers["head"]):
        tensors[f"head.{stage}.weight"] = random_tensor(VOCAB_SIZE, inner)
    return tensors


def case(name: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return the config of a speculator, its tensors, and the same with the usual names."""
    if name == "tied":
        tensors = speculator(TIED)
        return {**CONFIG, "tie_weights": True, "scale_input": True}, tensors, tensors
    if name == "tied, three heads":
        tensors = speculator({**TIED, "head": NUM_STAGES})
        return {**CONFIG, "tie_weights": True}, tensors, tensors
    if name == "scaled, IBM's names":
        tensors = speculator()
        config = {**CONFIG, "scale_input": True}
        return config, {f"speculator.{key}": each for key, each in tensors.items()}, tensors
    if name == "inner_dim 0":
        tensors = speculator(inner=SIZE)
        return {**CONFIG, "inner_dim": 0}, tensors, tensors
    tensors = speculator()
    return CONFIG, tensors, tensors


def plain_head(tensors: dict[str, Tensor], config: dict[str, Any]) -> Head:
    """The speculator in plain torch."""

    def tensor(kind: str, stage: int, part: str = "weight") -> Tensor:
        last = max(int(name.split(".")[1]) for name in tensors if name.startswith(f"{kind}."))
        return tensors[f"{kind}.{min(stage, last)}.{part}"]

    def normal(x: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    def compute(hidden: Tensor, last_id: int) -> list[Tensor]:
        state = normal(hidden) / 2**0.5 if config["scale_input"] else hidden
        share = 0.5 ** (0.5 / NUM_STAGES)
        inner = config["inner_dim"] or SIZE
        factor = ((1 - share**2) * inner / 2) ** 0.5 / share
        token = last_id
        every = []
        for stage in range(NUM_STAGES):
            mixed = tensor("proj", stage) @ state + factor * tensor("emb", stage)[token]
            scaled = tensor("ln", stage) * normal(mixed) + tensor("ln", stage, "bias")
            state = functional.gelu(scaled)
            logits = tensor("head", stage) @ state
            token = int(logits.argmax())
            every.append(logits)
        return every

    return compute


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_output_is_that_without_drafts(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path, engine: Any
) -> None:
    config, tensors, _ = case("plain")
    settings = drafting("mlp_speculator", write_head(tmp_path / "head", config, tensors))
    check_method(write("llama"), open_llm, settings, engine)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("plain", "recorded"),
        ("plain", "chunked"),
        ("plain", "preempted"),
        ("tied", "recorded"),
        ("tied, three heads", "eager"),
        ("scaled, IBM's names", "recorded"),
        ("inner_dim 0", "eager"),
    ],
)
def test_proposals_are_those_of_the_speculator(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    name: str,
    engine: str,
) -> None:
    config, tensors, same = case(name)
    settings = drafting("mlp_speculator", write_head(tmp_path / "head", config, tensors))
    head = plain_head(same, config)
    check_plain_proposals(write("llama"), open_llm, settings, engine, head)


def right_speculator(reference: Reference, folder: Path) -> str:
    """Write a speculator that says t + 1 after t, and let the target do so too. Returns the
    folder."""
    tensors = speculator_of_next(counting_target(reference), NUM_STAGES)
    return write_head(folder, {**CONFIG, "inner_dim": SIZE}, tensors)


def test_a_speculator_that_is_right(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    reference = write("llama")
    right = right_speculator(reference, tmp_path / "right")
    check_right_head(reference, open_llm, "mlp_speculator", right)


def test_two_ranks(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = write("llama")
    right = right_speculator(reference, tmp_path / "right")
    config, tensors, _ = case("tied")
    random = write_head(tmp_path / "random", config, tensors), plain_head(tensors, config)
    check_two_ranks(monkeypatch, reference, open_llm, "mlp_speculator", right, random)


def test_speculators_that_do_not_fit(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    tensors = speculator()
    heads = {
        "hidden states of size 48, .* has 32": ({**CONFIG, "emb_dim": 48}, tensors),
        r"emb\.3\.weight": ({**CONFIG, "n_predict": 4}, tensors),
        r"\.0\.weight": ({**CONFIG, "inner_dim": 16}, tensors),
    }
    check_refusals(write("llama"), open_llm, "mlp_speculator", tmp_path, heads)
