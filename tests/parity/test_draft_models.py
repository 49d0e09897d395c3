"""Drafts of models: what they propose is what these models say, and the output is that of plain
decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_heads import METHODS, proposals, worker_of
from safetensors.torch import load_file, save_file
from test_drafts import MIXED, PROMPTS, compare, params, run
from tiny_models import VOCAB_SIZE, Reference, divide, nightly

from pegboard import LLM
from pegboard.errors import ModelError
from pegboard_drafts.lengths import DraftLengths
from pegboard_testing.distributions import chi_square_fits

COUNT = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "recorded": {"block_size": 16},
    "eager": {"block_size": 16, "enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preempted": {"num_gpu_blocks_override": 29, "enable_prefix_caching": False},
}


@pytest.fixture(params=METHODS)
def drafting(
    request: pytest.FixtureRequest, write: Callable[..., Reference], tmp_path: Path
) -> tuple[str, Reference, Any, Any]:
    """The method's name, the target, the speculative config and what says the drafts."""
    target = write("llama", num_hidden_layers=4)
    config, head = METHODS[request.param](target, write, tmp_path)
    config |= {"num_speculative_tokens": COUNT, "adaptive_length": False}
    return request.param, target, config, head


@pytest.mark.sampled(3)
@pytest.mark.one_rank
@pytest.mark.parametrize("name", nightly(SETTINGS, "eager", "preempted"))
def test_the_output_is_that_of_plain_decoding(
    drafting: Any, open_llm: Callable[..., LLM], name: str
) -> None:
    """With every parameter that changes what is sampled; and again with cached prefixes."""
    method, target, config, head = drafting
    engine = dict(SETTINGS[name])
    if name == "preempted" and method in ("its own KV groups", "a window"):
        engine["num_gpu_blocks_override"] = 49
    plain = run(open_llm(target.directory, **engine), MIXED)
    llm = open_llm(target.directory, speculative_config=config, disable_log_stats=False, **engine)
    for _ in range(2):
        with proposals(llm) as pairs:
            compare(run(llm, MIXED), plain)
        assert sum(len(ids) for _, ids in pairs) > 200
        for tokens, ids in pairs[:: len(pairs) // 40]:
            assert ids == head.drafts(tokens, len(ids)), (method, tokens)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    is_preempted = metrics["vllm:num_preemptions"].value > 0
    assert is_preempted == (name == "preempted")


@pytest.mark.sampled(3)
@pytest.mark.one_rank
@pytest.mark.parametrize("name", nightly(["recorded", "chunked", "preempted"], "recorded"))
def test_tokens_that_wait_are_computed_before_drafts(
    drafting: Any, open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Most steps get no drafts here. The proposals of the others are those of the draft model,
    also after prefixes that requests have left in the cache."""
    method, target, config, head = drafting
    engine = dict(SETTINGS[name])
    if name == "preempted" and method in ("its own KV groups", "a window"):
        engine["num_gpu_blocks_override"] = 49
    steps = count()

    def seldom(self: DraftLengths, rows: list[int], counts: list[int]) -> list[int]:
        return counts if next(steps) % 7 == 6 else [0] * len(counts)

    monkeypatch.setattr(DraftLengths, "_worth_their_depth", seldom)
    monkeypatch.setattr(DraftLengths, "cut", lambda self, step, proposals: proposals)
    plain = run(open_llm(target.directory, **engine), MIXED)
    llm = open_llm(
        target.directory, speculative_config={**config, "adaptive_length": True}, **engine
    )
    with proposals(llm) as pairs:
        for _ in range(2):
            compare(run(llm, MIXED), plain)
    drafts = [(tokens, ids) for tokens, ids in pairs if ids]
    assert 10 < len(drafts) < len(pairs) / 3
    for tokens, ids in drafts:
        assert ids == head.drafts(tokens, len(ids)), tokens


@pytest.mark.one_rank
def test_a_draft_that_is_the_target_is_always_right(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    target = write("llama")
    config, _ = METHODS["itself"](target, write, tmp_path)
    config |= {"num_speculative_tokens": COUNT, "adaptive_length": False}
    llm = open_llm(target.directory, speculative_config=config, disable_log_stats=False)
    for _ in range(2):  # with cached prefixes
        run(llm, [params()] * len(PROMPTS))
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    proposed = metrics["vllm:spec_decode_num_draft_tokens"].value
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == proposed > 100


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "itself"])
def test_ranks_propose_alike(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
) -> None:
    target = write("llama", num_hidden_layers=4)
    config, _ = METHODS[method](target, write, tmp_path)
    plain = run(open_llm(target.directory), MIXED)
    divide(monkeypatch, 2, 1)
    config |= {"num_speculative_tokens": COUNT, "adaptive_length": False}
    compare(run(open_llm(target.directory, speculative_config=config), MIXED), plain)


@pytest.mark.sampled(3)
@pytest.mark.one_rank
def test_sleep_and_new_weights(drafting: Any, open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Both models sleep; new weights are those of the target."""
    method, target, config, head = drafting
    sampling = [params()] * len(PROMPTS)
    settings: dict[str, Any] = {"block_size": 16, "enable_prefix_caching": False}
    plain = run(open_llm(target.directory, **settings), sampling)
    with open_llm(
        target.directory, speculative_config=config, enable_sleep_mode=True, **settings
    ) as llm:
        worker = worker_of(llm)
        for level in (1, 2):
            weights = [layer.holders() for model in worker.models for layer in model.layers]
            tensors = [tensor for held in weights for each in held for tensor in each.tensors()]
            before = [tensor.clone() for tensor in tensors]
            llm.sleep(level=level)
            llm.wake_up()
            assert all(map(torch.equal, before, tensors))
            compare(run(llm, sampling), plain)
        with torch.no_grad():
            for parameter in target.model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        target.model.save_pretrained(tmp_path / "new")
        plain = run(open_llm(tmp_path / "new", **settings), sampling)
        llm.update_weights(str(tmp_path / "new"))
        compare(run(llm, sampling), plain)
        if method != "itself":  # which keeps the old weights
            with proposals(llm) as pairs:
                run(llm, sampling)
            for tokens, ids in pairs[::7]:
                assert ids == head.drafts(tokens, len(ids))


@pytest.mark.one_rank
def test_all_drafts_of_the_target_itself_are_accepted_when_sampled(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """They are drawn with the probabilities with which they are verified. Drafts of rows with a
    seed are not drawn."""
    target = write("llama")
    config, _ = METHODS["itself"](target, write, tmp_path)
    config |= {"num_speculative_tokens": COUNT, "adaptive_length": False}
    llm = open_llm(target.directory, speculative_config=config, disable_log_stats=False)
    sampled = params(temperature=1.3, top_p=0.9, top_k=50, min_p=0.01, logprobs=None)
    run(llm, [sampled] * len(PROMPTS))
    counts = [
        next(metric.value for metric in llm.get_metrics() if metric.name.endswith(name))
        for name in ("num_draft_tokens", "num_accepted_tokens")
    ]
    assert counts[0] > 60 and counts[1] >= counts[0] - 1  # numbers may round to either side
    run(llm, [params(temperature=1.3, seed=1)] * len(PROMPTS))
    again = next(
        metric.value for metric in llm.get_metrics() if metric.name.endswith("accepted_tokens")
    )
    assert again - counts[1] < 60


@pytest.mark.sampled(2)
@pytest.mark.one_rank
@pytest.mark.parametrize("method", ["eagle3", "the KV group of the target"])
def test_sampled_tokens_have_the_distribution_of_the_target(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path, method: str
) -> None:
    """Of the second and the third token, which were verified. The head of eagle3 knows only some of
    the tokens."""
    target = write("llama", num_hidden_layers=4)
    config, _ = METHODS[method](target, write, tmp_path)
    config |= {"num_speculative_tokens": 2, "adaptive_length": False}
    llm = open_llm(
        target.directory, speculative_config=config, max_num_seqs=64, max_num_batched_tokens=256
    )
    allowed = [3, 4, 5, 6, 7]
    sampled = params(temperature=0.8, n=64, max_tokens=4, logprobs=None, allowed_token_ids=allowed)
    prompt = PROMPTS[3]
    outputs = [
        list(completion.token_ids)
        for _ in range(40)
        for completion in llm.generate([{"prompt_token_ids": prompt}], sampled, use_tqdm=False)[
            0
        ].outputs
    ]
    shares = torch.ones(1)
    texts = [prompt]
    for place in range(3):
        logits = torch.stack([target.logprobs(text)[-1][allowed] for text in texts])
        shares = (shares[:, None] * (logits / 0.8).softmax(-1)).flatten()
        texts = [[*text, token] for text in texts for token in allowed]
        ways = [tuple(text[len(prompt) :]) for text in texts]
        counts = Counter(tuple(output[: place + 1]) for output in outputs)
        numbers = np.array([counts[way] for way in ways])
        assert chi_square_fits(numbers, shares.numpy()), (place, numbers, shares * len(outputs))


@pytest.mark.one_rank
def test_ids_outside_the_vocabulary_of_the_target(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    target = write("llama", num_hidden_layers=4)
    config, head = METHODS["eagle3"](target, write, tmp_path)
    path = Path(config["model"]) / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"][-1] = VOCAB_SIZE
    save_file(tensors, path)
    config |= {"num_speculative_tokens": COUNT}
    with pytest.raises(ModelError, match=f"d2t has token ids from .*from 0 to {VOCAB_SIZE - 1}"):
        open_llm(target.directory, speculative_config=config)
