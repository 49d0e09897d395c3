"""Tiny heads that propose tokens, and what their proposals are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from test_drafts import MIXED, PROMPTS, compare, params, run
from tiny_models import VOCAB_SIZE, Reference
from torch import Tensor

from pegboard import LLM
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
