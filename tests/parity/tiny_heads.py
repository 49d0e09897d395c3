"""Tiny heads that propose tokens, and what their proposals are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_drafts import MIXED, PROMPTS, compare, params, run
from tiny_models import VOCAB_SIZE, Reference, divide
from torch import Tensor
from torch.nn import functional

from pegboard import LLM
from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.draft import Drafts, DraftStep

SIZE = 32
NUM_DRAFTS = 3
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "recorded": {"block_size": 16},
    "eager": {"block_size": 16, "enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preempted": {"num_gpu_blocks_override": 29, "enable_prefix_caching": False},
}
TOLERANCE = 1e-4

Head = Callable[[Tensor, int], list[Tensor]]
"""(the target's hidden states [size] of a token, the token after it) → the logits of each draft,
by the target's ids [V]."""


def random_tensor(*shape: int) -> Tensor:
    """Values with the spread of a weight. The caller sets the seed."""
    return torch.randn(*shape) / shape[-1] ** 0.5


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Write the checkpoint of a head, and return its folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32", **config}))
    stored = {name: each.clone() for name, each in tensors.items()}  # files share no memory
    save_file(stored, folder / "model.safetensors")
    return str(folder)


def drafting(method: str, head: str | None, **more: Any) -> dict[str, Any]:
    """Return the settings of an engine that always drafts."""
    spec = {
        "method": method,
        "num_speculative_tokens": NUM_DRAFTS,
        "adaptive_length": False,
        **({} if head is None else {"model": head}),
        **more,
    }
    return {"speculative_config": spec, "disable_log_stats": False}


@dataclass
class Proposal:
    """What was proposed for one row. most: the limit of the row."""

    history: list[int]
    most: int
    token_ids: list[int]


def watch(llm: LLM) -> list[Proposal]:
    """Return the list of all later proposals of an engine, on all ranks, which grows."""
    executor: Any = llm.llm_engine.engine._parts.executor
    proposals: list[Proposal] = []
    for worker in getattr(executor, "workers", None) or [executor.worker]:
        proposer = worker.running.ending.proposer
        proposer.propose = partial(watched, proposer.propose, proposals)
    return proposals


def watched(
    propose: Callable[[DraftStep], Drafts], proposals: list[Proposal], step: DraftStep
) -> Drafts:
    drafts = propose(step)
    rows = zip(step.history, step.max_drafts.tolist(), drafts.token_ids, strict=True)
    proposals.extend(Proposal(np.array(h).tolist(), m, ids.tolist()) for h, m, ids in rows)
    return drafts


def check_proposals(
    reference: Reference, head: Head, proposals: list[Proposal], num_stages: int
) -> None:
    """Each proposal is what the head says of transformers' hidden states, and there are as many as
    there may be."""
    assert proposals
    for proposal in proposals:
        *text, last_id = proposal.history
        with torch.no_grad():
            states = reference.model(torch.tensor([text]), output_hidden_states=True).hidden_states
            logits = head(states[-1][0, -1], last_id)
        assert len(proposal.token_ids) == min(proposal.most, num_stages)
        for draft, row in zip(proposal.token_ids, logits, strict=False):
            assert row[draft] >= row.max() - TOLERANCE


def check_method(
    reference: Reference,
    open_llm: Callable[..., LLM],
    settings: Mapping[str, Any],
    engine: Mapping[str, Any],
) -> None:
    """Tokens and logprobs of greedy and of sampled requests, and those with cached prefixes, are
    those without drafts."""
    plain = run(open_llm(reference.directory, **engine), MIXED)
    llm = open_llm(reference.directory, **settings, **engine)
    compare(run(llm, MIXED), plain)
    compare(run(llm, MIXED), plain)
    compare(llm.generate([{"prompt_token_ids": PROMPTS[0]}], MIXED[0], use_tqdm=False), plain[:1])
    assert metric(llm, "draft_tokens") > 0


def check_plain_proposals(
    reference: Reference,
    open_llm: Callable[..., LLM],
    settings: Mapping[str, Any],
    engine: str,
    head: Head,
) -> None:
    """The proposals of an engine that answers greedily are those of the head in plain torch."""
    llm = open_llm(reference.directory, **settings, **ENGINES[engine])
    proposals = watch(llm)
    greedy(llm)
    check_proposals(reference, head, proposals, NUM_DRAFTS)


def check_right_drafts(llm: LLM, expected: list[list[int]]) -> None:
    """The greedy tokens are as expected, and nearly all drafts are accepted."""
    assert greedy(llm) == expected
    assert metric(llm, "accepted_tokens") > 0.9 * metric(llm, "draft_tokens") > 0


def check_right_head(
    reference: Reference, open_llm: Callable[..., LLM], method: str, folder: str
) -> None:
    """folder: that of a head that is right. It stays right with more drafts than it has stages, and
    with a length that adapts."""
    plain = greedy(open_llm(reference.directory))
    for more in ({}, {"num_speculative_tokens": 5}, {"adaptive_length": True}):
        check_right_drafts(open_llm(reference.directory, **drafting(method, folder, **more)), plain)


def check_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
    reference: Reference,
    open_llm: Callable[..., LLM],
    method: str,
    right: str,
    random: tuple[str, Head],
) -> None:
    """The ranks are threads. right: the folder of a head that is right. random: the folder of one
    that is not, and the same in plain torch."""
    folder, head = random
    plain = greedy(open_llm(reference.directory))
    divide(monkeypatch, 2, 1)
    check_right_drafts(open_llm(reference.directory, **drafting(method, right)), plain)
    llm = open_llm(reference.directory, **drafting(method, folder))
    proposals = watch(llm)
    assert greedy(llm) == plain
    check_proposals(reference, head, proposals, NUM_DRAFTS)


def check_refusals(
    reference: Reference,
    open_llm: Callable[..., LLM],
    method: str,
    folder: Path,
    heads: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Tensor]]],
) -> None:
    """An engine refuses a method without its head, and heads that do not fit. folder: where they
    are written. heads: a pattern of what the engine says → the config and the tensors."""
    with pytest.raises(ConfigError, match="needs a head: set spec_model"):
        open_llm(reference.directory, **drafting(method, None))
    for number, (words, (config, tensors)) in enumerate(heads.items()):
        path = write_head(folder / f"refused{number}", config, tensors)
        with pytest.raises(ModelError, match=words):
            open_llm(reference.directory, **drafting(method, path))


def metric(llm: LLM, name: str) -> float:
    """Return a sum of all requests."""
    values = {each.name: each for each in llm.get_metrics()}
    return values[f"vllm:spec_decode_num_{name}"].value


def greedy(llm: LLM) -> list[list[int]]:
    """Return the greedy tokens of all prompts."""
    answers = run(llm, [params()] * len(PROMPTS))
    return [list(answer.outputs[0].token_ids) for answer in answers]


def counting_target(reference: Reference) -> Tensor:
    """Change a Llama so that the token t + 1 follows t, and save it. Returns the embedding [V,
    size], whose rows differ much. The hidden states after t are its row, at another length."""
    torch.manual_seed(11)
    rows = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, SIZE), dim=-1)
    with torch.no_grad():
        for name, parameter in reference.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
        reference.model.model.embed_tokens.weight.copy_(rows)
        reference.model.lm_head.weight.copy_(following(rows, 1))
    reference.model.save_pretrained(reference.directory)
    return rows


def following(rows: Tensor, distance: int) -> Tensor:
    """Return the output head that says t + distance of row t."""
    return rows.roll(distance, 0)


def speculator_of_next(rows: Tensor, num_stages: int) -> dict[str, Tensor]:
    """The tensors of an `mlp_speculator` that says t + 1 after t, of which rows [V, size] is the
    embedding. It reads only the tokens."""
    normed = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    states = functional.normalize(functional.gelu(normed), dim=-1)
    tensors = {}
    for stage in range(num_stages):
        tensors[f"emb.{stage}.weight"] = rows
        tensors[f"ln.{stage}.weight"] = torch.ones(SIZE)
        tensors[f"ln.{stage}.bias"] = torch.zeros(SIZE)
        tensors[f"proj.{stage}.weight"] = torch.zeros(SIZE, SIZE)
        tensors[f"head.{stage}.weight"] = following(states, 1)
    return tensors
