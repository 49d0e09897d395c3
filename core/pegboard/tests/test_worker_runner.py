"""A step in the model runner, with a model that adds up tokens: what is embedded, sampled,
verified, proposed and kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.data.batch import BAD_LOGITS, CSR, Batch, BlockDelta, NewRequest, TransferReport
from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.attention import AttentionInputs, KVCacheSpec, KVGroup, KVPlan, KVTensor
from pegboard.interfaces.draft import Drafts, DraftStep
from pegboard.interfaces.sampler import Sampled, SampleStep
from pegboard.worker import drafting, model_runner
from pegboard.worker.drafting import SampleAndDraft
from pegboard.worker.memory import allocate
from pegboard.worker.model_runner import ModelRunner
from pegboard.worker.runner_parts import RunnerParts
from pegboard_testing.bound_model import BoundModel
from pegboard_testing.fake_limits import fake_limits

VOCAB = 50
BLOCK = 4


class SumBackend:
    """Stores each token's value, and returns for every position the sum of its row so far."""

    def __init__(self, cache: Tensor) -> None:
        self.cache = cache.flatten()
        self.inputs: AttentionInputs | None = None

    def plan(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs

    def __call__(self, values: Tensor) -> Tensor:
        inputs = self.inputs
        assert inputs is not None
        self.cache[inputs.slot_mapping] = values
        sums = []
        for row in range(inputs.num_rows):
            length, start, stop = (
                int(inputs.seq_lens[row]),
                *inputs.query_start_loc[row : row + 2].tolist(),
            )
            places = torch.arange(length)
            slots = inputs.block_table[row, places // BLOCK].long() * BLOCK + places % BLOCK
            sums.append(self.cache[slots].cumsum(0)[length - (stop - start) :])
        return torch.cat(sums)


class SumModel:
    """The next token is the sum of all tokens so far, modulo VOCAB."""

    def __init__(self, backend: SumBackend) -> None:
        self.backend = backend

    def embed(self, input_ids: Tensor) -> Tensor:
        return input_ids[:, None].float()

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.backend(hidden[:, 0])[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() % VOCAB, VOCAB).float()


class GreedySampler:
    """Takes the token with the largest logit, and accepts drafts as long as they are equal to
    it."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def add(self, row: int, *more: object) -> None:
        self.rows.add(row)

    def remove(self, rows: np.ndarray) -> None:
        self.rows -= set(rows.tolist())

    def sample(self, logits: Tensor, step: SampleStep) -> Sampled:
        best = logits.argmax(-1).tolist()
        drafts = iter(())
        found = []
        if step.draft_token_ids is not None:
            drafts = iter(step.draft_token_ids.tolist())
        for start, stop in zip(step.offsets.tolist(), step.offsets[1:].tolist(), strict=False):
            proposed = [next(drafts) for _ in range(stop - start - 1)]
            count = next(
                (i for i, token in enumerate(proposed) if token != best[start + i]), len(proposed)
            )
            found.append(best[start : start + count + 1])
        width = max(map(len, found))
        padded = torch.tensor([tokens + [-1] * (width - len(tokens)) for tokens in found])
        return Sampled(padded, torch.tensor([len(tokens) for tokens in found]))


class RepeatDraft:
    """Proposes the right tokens, but other tokens in every third call."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.rows: set[int] = set()
        self.step: DraftStep | None = None

    def add(self, row: int, *more: object) -> None:
        self.rows.add(row)

    def remove(self, rows: np.ndarray) -> None:
        self.rows -= set(rows.tolist())

    def propose(self, step: DraftStep) -> Any:
        self.num_calls += 1
        self.step = step
        proposals = []
        for history, room in zip(step.history, step.max_drafts.tolist(), strict=True):
            tokens = history.tolist()
            for _ in range(room):
                tokens.append((sum(tokens) + (self.num_calls % 3 == 0)) % VOCAB)
            proposals.append(np.array(tokens[len(history) :], np.int32))
        return Drafts(proposals)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]


def new_request(row: int, prompt: list[int], block_ids: np.ndarray) -> NewRequest:
    return NewRequest(
        row,
        str(row),
        np.array(prompt, np.int32),
        len(prompt),
        0,
        SamplingParams(),
        None,
        (block_ids,),
    )


def prompt_step(number: int, prompt: list[int], removed: np.ndarray) -> Batch:
    """Make a step in which row 0 computes its whole prompt, after rows were removed."""
    return Batch(
        step=number,
        rows=np.array([0], np.int32),
        num_scheduled_tokens=np.array([len(prompt)], np.int32),
        num_computed_tokens=np.array([0], np.int32),
        num_draft_tokens=np.array([0], np.int32),
        samples=np.array([True]),
        new=[new_request(0, prompt, np.array([3, 4], np.int32))],
        removed_rows=removed,
        new_blocks=BlockDelta.empty(),
        copy_blocks=np.zeros((0, 3), np.int32),
    )


def make_runner(max_drafts: int, max_draft_rows: int = 3) -> ModelRunner:
    spec = KVCacheSpec(tensors=(KVTensor("v", (1,), "float32"),))
    plan = KVPlan((KVGroup((0,), spec, BLOCK),), 200, 4 * BLOCK, BLOCK)
    views = allocate(plan, lambda size: torch.zeros(size, dtype=torch.uint8))
    backend = SumBackend(views[0]["v"])
    return ModelRunner(
        RunnerParts(
            loaded=BoundModel(SumModel(backend), backend),
            plan=plan,
            views=views,
            sampler=GreedySampler(),
            device="cpu",
            limits=fake_limits(
                max_num_seqs=3,
                max_num_batched_tokens=64,
                max_model_len=60,
                max_drafts=max_drafts,
                max_draft_rows=max_draft_rows,
            ),
            proposer=(lambda forwards: RepeatDraft()) if max_drafts else None,
        )
    )


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=3
    ),
    max_drafts=st.sampled_from([0, 0, 1, 3]),
    max_draft_rows=st.integers(1, 3),
    data=st.data(),
)
def test_tokens_are_those_of_the_model_whatever_the_chunks_and_drafts(
    prompts: list[list[int]], max_drafts: int, max_draft_rows: int, data: st.DataObject
) -> None:
    runner = make_runner(max_drafts, max_draft_rows)
    outputs: list[list[int]] = [[] for _ in prompts]
    computed = [0] * len(prompts)
    drafts: list[list[int]] = [[] for _ in prompts]
    blocks_of = [
        np.arange(1 + 20 * row, 16 + 20 * row, dtype=np.int32) for row in range(len(prompts))
    ]
    for step in range(12):
        rows = []
        counts = []
        num_drafts = []
        samples = []
        for row, prompt in enumerate(prompts):
            left = len(prompt) + len(outputs[row]) - computed[row]
            count = data.draw(st.integers(1, left)) if left > 1 else 1
            proposed = len(drafts[row]) if count == left else 0
            rows.append(row)
            counts.append(count + proposed)
            num_drafts.append(proposed)
            samples.append(count == left)
        new = []
        if step == 0:
            new = [new_request(row, prompt, blocks_of[row]) for row, prompt in enumerate(prompts)]
        none = np.zeros(0, np.int32)
        batch = Batch(
            step=step,
            rows=np.array(rows, np.int32),
            num_scheduled_tokens=np.array(counts, np.int32),
            num_computed_tokens=np.array(computed, np.int32),
            num_draft_tokens=np.array(num_drafts, np.int32),
            samples=np.array(samples),
            new=new,
            removed_rows=none,
            new_blocks=BlockDelta.empty(),
            copy_blocks=np.zeros((0, 3), np.int32),
        )
        result = runner.run(batch)()
        assert result.rows.tolist() == [
            row for row, wanted in zip(rows, samples, strict=True) if wanted
        ]
        assert (result.draft_token_ids is not None) == bool(max_drafts and len(result.rows))
        if result.draft_token_ids is not None:
            asked = runner.ending.proposer.step  # type: ignore[attr-defined]
            wanted = [number for number, sample in zip(num_drafts, samples, strict=True) if sample]
            assert asked.num_verified.tolist() == wanted
            assert asked.num_new.tolist() == np.diff(result.token_ids.offsets).tolist()
            assert len(result.rows) <= max_draft_rows or not len(result.draft_token_ids.flat)
        for place, row in enumerate(result.rows.tolist()):
            accepted = result.token_ids.row(place).tolist()
            computed[row] += counts[row] - num_drafts[row] + len(accepted) - 1
            outputs[row] += accepted
            drafts[row] = (
                result.draft_token_ids.row(place).tolist()
                if result.draft_token_ids is not None
                else []
            )
        for row in rows:
            if not samples[row]:
                computed[row] += counts[row]
        if max(len(prompt) + len(out) for prompt, out in zip(prompts, outputs, strict=True)) > 40:
            break
    for prompt, out in zip(prompts, outputs, strict=True):
        assert out == expected(prompt, len(out))


@pytest.mark.parametrize("max_drafts", [0, 2])
@pytest.mark.parametrize("broken", [0, -1])
def test_a_row_whose_logits_are_nan_is_told_apart(max_drafts: int, broken: int) -> None:
    """Also if only the last of its logits rows is broken, after drafts. The other row gets its
    tokens."""
    runner = make_runner(max_drafts)
    model: Any = runner.parts.loaded.model
    none = np.zeros(0, np.int32)
    prompts = [[1], [3]]
    new = [
        new_request(row, prompt, np.arange(1 + 20 * row, 16 + 20 * row))
        for row, prompt in enumerate(prompts)
    ]
    num_drafts = [0, 0]
    computed = [0, 0]
    tokens = [[], []]
    for step in range(2):
        batch = Batch(
            step=step,
            rows=np.array([0, 1], np.int32),
            num_scheduled_tokens=np.array(num_drafts, np.int32) + 1,
            num_computed_tokens=np.array(computed, np.int32),
            num_draft_tokens=np.array(num_drafts, np.int32),
            samples=np.array([True, True]),
            new=new if step == 0 else [],
            removed_rows=none,
            new_blocks=BlockDelta.empty(),
            copy_blocks=np.zeros((0, 3), np.int32),
        )
        result = runner.run(batch)()
        tokens = result.token_ids.lists()
        num_drafts = (
            [len(drafts) for drafts in result.draft_token_ids.lists()]
            if result.draft_token_ids
            else [0, 0]
        )
        computed = [1, 1]
        logits = type(model).logits

        def nan_rows(hidden: Tensor, rows: int = num_drafts[0] + 1, logits: Any = logits) -> Tensor:
            found: Tensor = logits(model, hidden)
            found[:rows][broken] = float("nan")
            return found

        model.logits = nan_rows
    assert set(tokens[0]) == {BAD_LOGITS}
    assert tokens[1] == expected([3, 3], len(tokens[1])) and BAD_LOGITS not in tokens[1]


def test_a_row_that_is_taken_again_knows_nothing_of_the_one_before() -> None:
    runner = make_runner(0)
    none = np.zeros(0, np.int32)

    def step(number: int, prompt: list[int], removed: np.ndarray) -> list[int]:
        return runner.run(prompt_step(number, prompt, removed))().token_ids.row(0).tolist()

    assert step(1, [1, 2, 3, 4, 5, 6], none) == [21]
    assert step(2, [2, 2], np.array([0], np.int32)) == [4]


def test_a_step_without_rows_only_cleans_up() -> None:
    runner = make_runner(1)
    none = np.zeros(0, np.int32)
    ending = runner.ending
    assert isinstance(ending, SampleAndDraft)
    assert isinstance(ending.sampler, GreedySampler) and isinstance(ending.proposer, RepeatDraft)
    ending.sampler.rows.add(2)
    ending.proposer.rows.update({1, 2})
    batch = Batch(
        step=5,
        rows=none,
        num_scheduled_tokens=none,
        num_computed_tokens=none,
        num_draft_tokens=none,
        samples=np.zeros(0, bool),
        new=[],
        removed_rows=np.array([2], np.int32),
        new_blocks=BlockDelta.empty(),
        copy_blocks=np.zeros((0, 3), np.int32),
        draft_token_ids=CSR.of([]),
    )
    output = runner.run(batch)()
    assert (output.step, len(output.rows), len(output.token_ids)) == (5, 0, 0)
    assert not ending.sampler.rows
    assert ending.proposer.rows == {1}


def test_the_parts_of_a_step_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a time of its own, a power of two, so that a sum shows which calls are in
    it."""
    runner = make_runner(1)
    none = np.zeros(0, np.int32)
    now = [0]
    connector: Any = SimpleNamespace(
        save=lambda data: None, begin=lambda data: None, end=TransferReport
    )
    runner.parts.connectors["fake"] = connector
    backend = runner.parts.loaded.attention.backends[0][1]

    def make_slow(owner: Any, name: str, seconds: int) -> None:
        call = getattr(owner, name)

        def slow(*words: Any) -> Any:
            now[0] += seconds
            return call(*words)

        setattr(owner, name, slow)

    model = runner.parts.loaded.model
    ending = runner.ending
    assert isinstance(ending, SampleAndDraft)
    sampler = ending.sampler
    transfers = [(connector, "save"), (connector, "begin"), (connector, "end")]
    before = [(sampler, "add"), (backend, "plan")]
    after = [
        (model, "forward"),
        (model, "logits"),
        (sampler, "sample"),
        (ending.proposer, "propose"),
    ]
    for exponent, (owner, name) in enumerate(transfers + before + after):
        make_slow(owner, name, 1 << exponent)
    for module in (model_runner, drafting):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    times = runner.run(prompt_step(1, [1, 2], none))().times
    assert times.transfer_s == 0b111 and times.prepare_s == 0b1000 and times.plan_s == 0b10000
    assert (
        times.forward_s == 0b110000
        and times.sample_s == 0b11000000
        and times.draft_s == 0b100000000
    )
    assert times.total_s == now[0] == 0b111111111
