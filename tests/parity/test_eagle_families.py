"""EAGLE heads of Llama 4, MiniCPM and Mistral Large 3: what they propose is what plain torch says,
and the output is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import proposals
from test_drafts import MIXED, PROMPTS, compare, params, run
from tiny_eagles import FAMILIES, TinyEagle
from tiny_models import divide

from pegboard import LLM
from pegboard.errors import ModelError

ENGINES: dict[str, dict[str, Any]] = {
    "recorded": {"block_size": 16},
    "eager": {"block_size": 16, "enforce_eager": True},
    "chunked": {"block_size": 16, "max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preempted": {
        "block_size": 16,
        "max_model_len": 60,
        "num_gpu_blocks_override": 6,
        "enable_prefix_caching": False,
    },
}
GREEDY = [params()] * len(PROMPTS)


def value(llm: LLM, name: str) -> Any:
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def check_proposals(eagle: TinyEagle, pairs: list[tuple[list[int], list[int]]]) -> None:
    assert sum(len(ids) for _, ids in pairs) > 200
    for tokens, ids in pairs[:: len(pairs) // 40]:
        assert ids == eagle.drafts(tokens, len(ids)), len(tokens)


@pytest.mark.sampled(3)
@pytest.mark.one_rank
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FAMILIES)
def test_output_and_proposals(
    open_llm: Callable[..., LLM], tmp_path: Path, name: str, engine: str
) -> None:
    """Also again, with cached prefixes."""
    eagle = TinyEagle(tmp_path, FAMILIES[name])
    settings = dict(ENGINES[engine])
    if engine == "preempted" and name == "llama4":
        settings["num_gpu_blocks_override"] = 17  # it has several KV groups
    with open_llm(eagle.directory, **settings) as llm:
        plain = run(llm, MIXED)
    with open_llm(eagle.directory, **eagle.drafting(), **settings) as llm:
        for _ in range(2):
            with proposals(llm) as pairs:
                compare(run(llm, MIXED), plain)
            check_proposals(eagle, pairs)
        assert (value(llm, "num_preemptions") > 0) == (engine == "preempted")


@pytest.mark.one_rank
@pytest.mark.parametrize("name", FAMILIES)
def test_an_embedding_and_a_head_of_its_own(
    open_llm: Callable[..., LLM], tmp_path: Path, name: str
) -> None:
    eagle = TinyEagle(tmp_path, FAMILIES[name], has_table=True)
    with open_llm(eagle.directory, **eagle.drafting(), block_size=16) as llm:
        with proposals(llm) as pairs:
            run(llm, GREEDY)
        check_proposals(eagle, pairs)


@pytest.mark.one_rank
@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_that_is_right(open_llm: Callable[..., LLM], tmp_path: Path, name: str) -> None:
    eagle = TinyEagle(tmp_path, FAMILIES[name], is_right=True)
    with open_llm(eagle.directory, block_size=16) as llm:
        plain = run(llm, GREEDY)
    with open_llm(eagle.directory, **eagle.drafting(), block_size=16) as llm:
        compare(run(llm, GREEDY), plain)
        drafts, accepted = (
            value(llm, f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted")
        )
    assert drafts * 0.9 < accepted <= drafts


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks(
    open_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    eagle = TinyEagle(tmp_path, FAMILIES[name], is_right=True)
    with open_llm(eagle.directory) as llm:
        plain = run(llm, MIXED)
    divide(monkeypatch, 2, 1)
    with open_llm(eagle.directory, **eagle.drafting()) as llm:
        compare(run(llm, MIXED), plain)
        assert value(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.one_rank
@pytest.mark.parametrize("name", FAMILIES)
def test_heads_that_do_not_fit(open_llm: Callable[..., LLM], tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    eagle = TinyEagle(tmp_path, family)

    def refused(words: str, edit: Callable[..., None]) -> None:
        eagle.write(tmp_path)
        eagle.change(edit)
        with pytest.raises(ModelError, match=words):
            open_llm(eagle.directory, **eagle.drafting())

    def narrow(config: Any, tensors: Any) -> None:
        tensors["model.fc.weight"] = torch.zeros(7, 64)

    refused("model.fc.weight has shape", narrow)
    first = f"model.{family.layers}.0.input_layernorm.weight"
    refused(first, lambda config, tensors: tensors.pop(first))
    refused("of size 48, and those", lambda config, tensors: config.update(hidden_size=48))
    with pytest.raises(ModelError, match="predicts tokens of another model"):
        open_llm(eagle.head_directory)


@pytest.mark.one_rank
def test_what_is_not_computed(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Experts in a head of Llama 4, and factors of late queries in one of Mistral Large 3."""
    for name, more, words in (
        ("llama4", {"moe_layers": [1]}, r"experts in layers \[1\]"),
        (
            "mistral_large_3",
            {"llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.1}},
            "set max_model_len to at most 32",
        ),
    ):
        eagle = TinyEagle(tmp_path / name, FAMILIES[name])
        eagle.change(lambda config, tensors, more=more: config.update(more))
        with pytest.raises(ModelError, match=words):
            open_llm(eagle.directory, **eagle.drafting())
    with open_llm(eagle.directory, max_model_len=32, **eagle.drafting()):
        pass
