"""What the scheduler puts into each batch: order, budgets, chunks, preemption, forks, rows. The
tests look at the batches that a fake executor gets."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.batch import Batch
from pegboard.data.request import LoRARequest
from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.engine.actions import StopProfile
from pegboard.engine.batch_builder import Entry, StepSchedule
from pegboard.interfaces.attention import Full, State, Window
from pegboard.interfaces.draft import Drafts, DraftSetup, DraftStep
from pegboard.interfaces.scheduling_policy import StepBudget
from pegboard_testing.fake_draft import FakeDraft
from pegboard_testing.fake_engine import EOS, FakeEngine, scored_prompt
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.fake_structured_output import FakeStructuredOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def greedy(max_tokens: int | None = 4, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def tokens_per_step(engine: FakeEngine) -> list[list[int]]:
    return [batch.num_scheduled_tokens.tolist() for batch in engine.executor.batches]


def last(engine: FakeEngine) -> Batch:
    return engine.executor.batches[-1]


# --- budgets and chunks ---------------------------------------------------------------------------


def test_a_long_prompt_is_cut_by_the_budget_and_samples_only_at_its_end() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add("a", range(20), greedy(2))
    engine.run()
    assert tokens_per_step(engine) == [[8], [8], [4], [1]]
    assert [batch.samples.tolist() for batch in engine.executor.batches] == [
        [False],
        [False],
        [True],
        [True],
    ]


def test_decodes_come_first_and_share_the_step_with_a_prefill() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    engine.add("a", range(3), greedy(20))
    engine.step()
    engine.add("b", range(12), GREEDY)
    engine.step()
    assert tokens_per_step(engine)[-1] == [1, 7]
    engine.step()
    assert tokens_per_step(engine)[-1] == [1, 5]


def test_rows_with_few_tokens_precede_prefills_whatever_was_admitted_first() -> None:
    engine = FakeEngine(max_num_batched_tokens=8, max_num_seqs=3)
    engine.add("long", range(30), greedy(3))
    engine.step()
    engine.add("short", [5], greedy(9))
    for _ in range(4):
        engine.step()
        counts = last(engine).num_scheduled_tokens
        assert (np.diff((counts > 1).astype(int)) >= 0).all()


def test_the_chunk_limit_leaves_room_for_others() -> None:
    engine = FakeEngine(
        max_num_batched_tokens=16, long_prefill_token_threshold=5, max_num_partial_prefills=2
    )
    engine.add("long", range(20), GREEDY)
    engine.add("short", range(3), GREEDY)
    engine.step()
    assert tokens_per_step(engine) == [[5, 3]]


def test_a_second_partial_prefill_waits_and_a_short_prompt_passes_it() -> None:
    engine = FakeEngine(
        max_num_batched_tokens=16, long_prefill_token_threshold=5, max_num_partial_prefills=1
    )
    engine.add("long", range(20), GREEDY)
    engine.add("also long", range(1, 21), GREEDY)
    engine.add("short", range(3), GREEDY)
    engine.step()
    assert [new.request_id for new in last(engine).new] == ["long", "short"]


def test_without_chunked_prefill_a_prompt_gets_a_whole_step_and_blocks_the_line() -> None:
    engine = FakeEngine(max_num_batched_tokens=16, enable_chunked_prefill=False)
    engine.add("a", range(10), greedy(1))
    engine.add("b", range(10, 20), greedy(1))
    engine.add("c", range(2), greedy(1))
    engine.run()
    assert tokens_per_step(engine) == [[10], [10, 2]]


def test_no_more_rows_than_max_num_seqs() -> None:
    engine = FakeEngine(max_num_seqs=2)
    for i in range(5):
        engine.add(str(i), [i + 3], greedy(3))
    engine.run()
    assert max(len(batch.rows) for batch in engine.executor.batches) == 2


def test_never_a_token_past_max_tokens_or_max_model_len_also_ahead() -> None:
    for depth in (1, 2, 3):
        engine = FakeEngine(max_in_flight=depth, max_model_len=16)
        engine.add("a", range(3), greedy(5))
        engine.add("b", range(10), greedy(None))
        engine.run()
        assert engine.worker.num_tokens == (3 + 4) + (10 + 5), "a certain end is never overrun"
        assert [len(engine.results[name, 0].token_ids) for name in "ab"] == [5, 6]
        assert {engine.results[name, 0].finish_reason for name in "ab"} == {"length"}
        assert engine.executor.max_in_flight == depth


@pytest.mark.parametrize("stages", [2, 3])
def test_pipeline_stages_share_the_requests(stages: int) -> None:
    """Each stage has work, and no request computes a token that the first stage does not know."""
    engine = FakeEngine(
        max_in_flight=stages, num_stages=stages, max_num_batched_tokens=64, max_num_seqs=5
    )
    for i in range(5):
        engine.add(str(i), range(i, i + 4), greedy(9))
    engine.run()
    batches = [batch.rows.tolist() for batch in engine.executor.batches]
    assert max(map(len, batches)) == -(-5 // stages)
    assert len(batches) == 9 * stages
    for first in range(0, len(batches), stages):
        assert sorted(sum(batches[first : first + stages], [])) == [0, 1, 2, 3, 4]
    assert engine.executor.max_in_flight == stages
    engine.check_idle()


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    engine = FakeEngine(max_in_flight=2, num_stages=2, max_num_seqs=1, max_num_batched_tokens=4)
    engine.add("a", range(14), greedy(3))
    engine.step()
    assert [batch.num_tokens for batch in engine.executor.batches] == [4, 4]
    engine.run()
    assert tokens_per_step(engine)[-3:] == [[2], [1], [1]]


# --- preemption -----------------------------------------------------------------------------------


def test_the_last_admitted_gives_its_blocks_back_and_resumes_with_all_its_tokens() -> None:
    engine = FakeEngine(
        num_blocks=9,
        block_size=4,
        max_model_len=32,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
    )
    engine.add("a", range(8), greedy(16))
    engine.add("b", range(8, 16), greedy(12))
    results = engine.run()
    assert engine.engine.stats()["num_preemptions_total"] == 1
    assert [len(results[name, 0].token_ids) for name in "ab"] == [16, 12]
    resumed = [
        new for batch in engine.executor.batches for new in batch.new if new.request_id == "b"
    ]
    assert (
        len(resumed) == 2 and len(resumed[1].token_ids) > 8 and resumed[1].num_computed_tokens == 0
    )
    assert resumed[1].num_prompt_tokens == 8


def test_no_request_is_admitted_in_a_step_that_preempts() -> None:
    engine = FakeEngine(
        num_blocks=9,
        block_size=4,
        max_model_len=32,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
    )
    for name, first in (("a", 0), ("b", 8), ("c", 16)):
        engine.add(name, range(first, first + 8), greedy(16))
    before = 0
    while engine.engine.has_work:
        engine.step()
        preempted = engine.engine.stats()["num_preemptions_total"]
        if preempted > before:
            assert not last(engine).new
        before = preempted
    assert before


def test_priority_decides_who_goes_first_and_who_goes_back() -> None:
    engine = FakeEngine(
        num_blocks=9,
        block_size=4,
        max_model_len=32,
        max_num_batched_tokens=32,
        by_priority=True,
        enable_prefix_caching=False,
    )
    engine.add("low", range(8), greedy(16), priority=5)
    engine.add("high", range(8, 16), greedy(16), priority=1)
    engine.step()
    assert [new.request_id for new in last(engine).new] == ["high", "low"]
    order = []
    while engine.engine.has_work:
        order += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert order == ["high", "low"]
    assert engine.engine.stats()["num_preemptions_total"] >= 1


def test_a_preempted_row_is_not_reused_while_a_step_holds_it() -> None:
    """The worker asserts this for every row. This test forces the situation with two steps in
    flight and one block too few."""
    engine = FakeEngine(
        num_blocks=10, block_size=2, max_model_len=16, max_num_batched_tokens=8, max_in_flight=2
    )
    for i in range(4):
        engine.add(str(i), range(i, i + 4), greedy(12))
    engine.run()
    assert engine.engine.stats()["num_preemptions_total"]
    engine.check_idle()


def test_a_window_keeps_what_a_step_in_flight_reads() -> None:
    engine = FakeEngine(
        [Window(4)], block_size=1, max_in_flight=2, max_num_batched_tokens=5, max_model_len=48
    )
    engine.add("a", range(30), greedy(9))
    while engine.engine.has_work:
        engine.step()
        for request in engine.engine._live.running:
            first_read = max(0, request.num_confirmed_tokens - 3)
            assert all(engine.engine._live.kv.tables(request)[0][first_read:])


# --- prefix cache ---------------------------------------------------------------------------------


def test_a_shared_prompt_is_computed_once() -> None:
    engine = FakeEngine(block_size=4)
    first = engine.generate(range(14), GREEDY)
    again = engine.generate(range(14), GREEDY)
    assert first.token_ids == again.token_ids
    assert [result.deltas[0].num_cached_tokens for result in (first, again)] == [0, 12]
    assert engine.worker.num_tokens == (14 + 3) + (2 + 3)
    assert engine.engine.stats()["prefix_cache_hits_total"] == 12


def test_outputs_are_cached_as_well() -> None:
    engine = FakeEngine(block_size=4)
    outputs = engine.generate(range(6), greedy(11)).token_ids
    follow_up = engine.generate([*range(6), *outputs, 3], GREEDY)
    assert follow_up.deltas[0].num_cached_tokens == 16


@pytest.mark.parametrize("fields", [{"cache_salt": "x"}, {"lora": LoRARequest("l", 1, "/p")}])
def test_what_must_not_be_shared_is_not(fields: dict[str, Any]) -> None:
    engine = FakeEngine(block_size=4, max_loras=1)
    engine.generate(range(14), GREEDY)
    assert engine.generate(range(14), GREEDY, **fields).deltas[0].num_cached_tokens == 0
    assert engine.generate(range(14), GREEDY, **fields).deltas[0].num_cached_tokens == 12


def test_prompt_logprobs_read_nothing_from_the_cache_but_write_to_it() -> None:
    engine = FakeEngine(block_size=4)
    params = greedy(prompt_logprobs=1)
    for _ in range(2):
        result = engine.generate(range(14), params)
        assert result.deltas[0].num_cached_tokens == 0
        assert scored_prompt(result.deltas[0]) == list(range(1, 14))
    assert engine.generate(range(14), GREEDY).deltas[0].num_cached_tokens == 12


def test_states_are_reused_from_their_checkpoints() -> None:
    engine = FakeEngine([Full(), State(checkpoint_every=8)], block_size=4)
    first = engine.generate(range(21), GREEDY)
    again = engine.generate(range(21), GREEDY)
    assert first.token_ids == again.token_ids
    assert again.deltas[0].num_cached_tokens == 16


# --- n > 1 ----------------------------------------------------------------------------------------


def test_completions_share_the_prompt_by_fork() -> None:
    engine = FakeEngine(enable_prefix_caching=False, block_size=4)
    engine.add("a", range(14), SamplingParams(n=3, seed=7, max_tokens=6))
    results = engine.run()
    assert engine.worker.num_tokens == (14 + 5) + 2 * (1 + 5)
    assert len({tuple(results["a", i].token_ids) for i in range(3)}) == 3
    assert [new.num_computed_tokens for batch in engine.executor.batches for new in batch.new] == [
        0,
        13,
        13,
    ]
    assert sum(len(batch.copy_blocks) for batch in engine.executor.batches) == 2
    engine.check_idle()


def test_a_child_without_a_parent_to_fork_from_is_admitted_normally() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add("a", range(10), SamplingParams(n=3, seed=7, max_tokens=3))
    results = engine.run()
    assert all(results["a", i].finish_reason == "length" for i in range(3))
    starts = [new.num_computed_tokens for batch in engine.executor.batches for new in batch.new]
    assert starts == [0, 8, 8], "full blocks come from the prefix cache; a fork would start at 9"


def test_a_window_is_kept_for_children_that_still_wait() -> None:
    engine = FakeEngine([Window(4)], block_size=1, max_num_seqs=2, enable_prefix_caching=False)
    engine.add("other", range(5), greedy(6))
    engine.add("a", range(12), SamplingParams(n=2, seed=7, max_tokens=20))
    engine.run()
    assert [new.num_computed_tokens for batch in engine.executor.batches for new in batch.new] == [
        0,
        0,
        11,
    ]


def test_a_parent_that_is_short_of_blocks_stops_keeping_its_window() -> None:
    engine = FakeEngine(
        [Window(4)],
        block_size=1,
        spare_blocks=0,
        max_num_batched_tokens=4,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    engine.add("a", range(12), SamplingParams(n=2, seed=7, max_tokens=40))
    results = engine.run()
    assert [len(results["a", i].token_ids) for i in range(2)] == [40, 40]


def test_one_completion_can_be_aborted_alone() -> None:
    engine = FakeEngine()
    engine.add("a", range(5), SamplingParams(n=2, seed=1, max_tokens=20))
    engine.step()
    engine.step()
    engine.engine.abort(["1_a"])
    results = engine.run()
    assert [results["a", i].finish_reason for i in range(2)] == ["length", "abort"]


# --- drafts ---------------------------------------------------------------------------------------


def test_right_drafts_save_steps_and_change_nothing() -> None:
    plain = FakeEngine()
    fast = FakeEngine(max_drafts=3, draft=partial(FakeDraft, accuracy=1.0))
    assert (
        plain.generate(range(5), greedy(30)).token_ids
        == fast.generate(range(5), greedy(30)).token_ids
    )
    assert fast.worker.num_steps < 0.7 * plain.worker.num_steps


def test_wrong_drafts_are_taken_back() -> None:
    plain = FakeEngine()
    wrong = FakeEngine(max_drafts=3, draft=partial(FakeDraft, accuracy=0.0))
    assert (
        plain.generate(range(5), greedy(30)).token_ids
        == wrong.generate(range(5), greedy(30)).token_ids
    )
    assert wrong.worker.num_steps == plain.worker.num_steps


def test_drafts_never_reach_beyond_the_last_token_that_may_come() -> None:
    engine = FakeEngine(max_drafts=3, draft=partial(FakeDraft, accuracy=1.0), max_model_len=20)
    engine.add("a", range(5), greedy(7))
    engine.add("b", range(5, 12), greedy(None))
    results = engine.run()
    assert [len(results[name, 0].token_ids) for name in "ab"] == [7, 13]
    for batch in engine.executor.batches:
        assert (batch.num_computed_tokens + batch.num_scheduled_tokens <= 19).all()


class LateDraft:
    """Proposes one token after 12 tokens, and none before."""

    def __init__(self, setup: DraftSetup) -> None: ...

    def add(self, row: int, token_ids: np.ndarray) -> None: ...

    def remove(self, rows: np.ndarray) -> None: ...

    def propose(self, step: DraftStep) -> Drafts:
        return Drafts([np.full(int(len(history) > 12), 1, np.int32) for history in step.history])


def test_steps_are_scheduled_ahead_only_while_no_request_has_drafts() -> None:
    engine = FakeEngine(max_drafts=3, draft=LateDraft, max_in_flight=2)
    engine.add("a", range(5), greedy(16))
    in_flight = dict[int, int]()
    while not (deltas := engine.step()) or deltas[-1].finish_reason is None:
        in_flight[len(in_flight)] = engine.engine.stats()["num_steps_in_flight"]
    assert max(list(in_flight.values())[:7]) == 1 and set(list(in_flight.values())[9:]) == {0}
    verifying = [bool(batch.num_draft_tokens.any()) for batch in engine.executor.batches]
    assert not any(verifying[:8]) and all(verifying[10:-1])


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_steps_with_drafts_are_scheduled_ahead_if_the_device_keeps_the_drafts(
    accuracy: float,
) -> None:
    draft = partial(FakeDraft, accuracy=accuracy)
    engine = FakeEngine(max_drafts=3, draft=draft, drafts_ahead=True, max_in_flight=2)
    engine.add("a", range(5), greedy(30))
    in_flight = []
    while not (deltas := engine.step()) or deltas[-1].finish_reason is None:
        in_flight.append(engine.engine.stats()["num_steps_in_flight"])
    plain = FakeEngine().generate(range(5), greedy(30)).token_ids
    assert engine.results["a", 0].token_ids == plain
    is_ahead = [count == 1 for count in in_flight]
    assert sum(is_ahead) > 0.6 * len(is_ahead), "all but the last steps"
    verified = [int(batch.num_draft_tokens[0]) for batch in engine.executor.batches]
    assert verified[0] == 0 and verified[1:-8] == [3] * len(verified[1:-8])


def test_a_request_with_a_grammar_waits_for_its_drafts() -> None:
    engine = FakeEngine(
        max_drafts=3,
        draft=partial(FakeDraft, accuracy=1.0),
        drafts_ahead=True,
        max_in_flight=2,
        structured_output=FakeStructuredOutput(64, [EOS]),
    )
    grammar = StructuredOutputsParams(grammar="3:0,1,2:4")
    engine.add("a", range(5), greedy(12, structured_outputs=grammar))
    while not engine.step():
        pass  # until the grammar is compiled, in a thread
    engine.add("b", range(7), greedy(30))
    engine.run()
    together = [batch for batch in engine.executor.batches if batch.needs_masks]
    assert any(batch.num_draft_tokens.any() for batch in together)
    plain = FakeEngine(structured_output=FakeStructuredOutput(64, [EOS]))
    plain.add("a", range(5), greedy(12, structured_outputs=grammar))
    plain.add("b", range(7), greedy(30))
    plain.run()
    for name in "ab":
        assert engine.results[name, 0].token_ids == plain.results[name, 0].token_ids


# --- adapters -------------------------------------------------------------------------------------


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"lora{number}", number, f"/{number}", digest=f"d{number}")


def test_a_batch_never_wants_more_adapters_than_there_are_slots() -> None:
    engine = FakeEngine(max_loras=2, max_num_seqs=4)
    for i, number in enumerate((1, 2, 3, 1)):
        engine.add(str(i), range(i, i + 5), greedy(6), lora=adapter(number))
    engine.add("base", range(4), greedy(3))
    engine.step()
    assert [new.request_id for new in last(engine).new] == ["0", "1", "3", "base"], (
        "the third adapter waits, others pass"
    )
    assert last(engine).lora_slots is not None and sorted(
        set(last(engine).lora_slots.tolist())
    ) == [0, 1, 2]
    engine.run()
    for batch in engine.executor.batches:
        assert len(set(batch.lora_slots.tolist()) - {0}) <= 2


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_an_adapter_that_cannot_be_loaded_is_the_error_of_its_request_only(
    max_in_flight: int,
) -> None:
    engine = FakeEngine(max_loras=1, max_num_seqs=4, max_in_flight=max_in_flight)
    engine.worker.bad_adapters.add("/2")
    engine.add("base", range(4), greedy(9))
    engine.add("good", range(5), greedy(9), lora=adapter(1))
    engine.step()
    engine.add("bad", range(6), greedy(9, n=1), lora=adapter(2))
    engine.run()
    bad = engine.results["bad", 0]
    assert (bad.finish_reason, bad.token_ids, bad.deltas[-1].error_parameter) == (
        "error",
        [],
        "lora_request",
    )
    assert bad.deltas[-1].error == "adapter 'lora2': /2 is missing"
    assert {engine.results[name, 0].finish_reason for name in ("base", "good")} == {"length"}
    engine.worker.bad_adapters.clear()  # the file is there now, and the slot is free
    assert engine.generate(range(6), greedy(3), lora=adapter(2)).finish_reason == "length"
    engine.check_idle()


def test_a_worker_call_waits_for_the_steps_in_flight() -> None:
    """A step in flight may need masks, which only the engine's thread sends."""
    engine = FakeEngine(max_in_flight=3)
    engine.add("a", range(4), greedy(9))
    engine.step()
    assert engine.engine.stats()["num_steps_in_flight"] > 0
    engine.ask(StopProfile())
    assert engine.engine.stats()["num_steps_in_flight"] == 0
    engine.run()
    assert engine.results["a", 0].finish_reason == "length"


def test_the_least_recently_used_adapter_makes_room() -> None:
    engine = FakeEngine(max_loras=2)
    for number in (1, 2, 1, 3, 1, 2):
        engine.generate(range(number, number + 4), GREEDY, lora=adapter(number))
    reads = [
        args[1].lora_int_id for method, args in engine.executor.calls if method == "read_adapter"
    ]
    assert reads == [1, 2, 3, 2]


class Prompt:
    def __init__(self, num_tokens: int) -> None:
        self.num_prompt_tokens = num_tokens


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9), st.booleans()), max_size=6),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_a_request_that_leaves_a_plan_leaves_its_share(
    entries: list[tuple[int, int, bool]], prefills: int, long: int
) -> None:
    """A prompt is long if it has more tokens than a chunk may have."""
    schedule = StepSchedule(fake_limits(), StepBudget(100, 8, prefills, long), 0, 8)
    requests = [Prompt(length) for length, _, _ in entries]

    def state() -> tuple[int, list[bool]]:
        return schedule.tokens_left, [schedule.allows_partial(Prompt(n)) for n in (7, 8, 9)]

    states = []
    for request, (_, count, samples) in zip(requests, entries, strict=True):
        states.append(state())
        schedule.put(request, Entry(count, 0, samples, ()))
    num_partial = sum(not samples for _, _, samples in entries)
    num_long = sum(length > 8 and not samples for length, _, samples in entries)
    may = num_partial < prefills
    assert state() == (
        100 - sum(count for _, count, _ in entries),
        [may, may, may and num_long < long],
    )
    while requests:
        schedule.withdraw(requests.pop())
        assert state() == states.pop()
