"""Two things at once: aborts in every step of a load or of n > 1, reloads of adapters of preempted
requests, full pools. The fake engine checks its invariants after every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.data.batch import TransferReport
from pegboard.data.request import EngineRequest, LoRARequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.actions import ResetPrefixCache
from pegboard.engine.kv.connectors import KVConnectors
from pegboard.engine.kv.hashes import root_hash, sha256_block
from pegboard.interfaces.attention import Full, Retain, State, Window
from pegboard.interfaces.kv_connector import BlockView, Match, Release
from pegboard.interfaces.metrics import BlocksStored, KVEvent, Metric, Sample
from pegboard.interfaces.scheduling_policy import (
    RequestView,
    SchedulingPolicySetup,
    StepBudget,
    StepLoad,
)
from pegboard_testing.fake_connectors import FakeKV
from pegboard_testing.fake_draft import FakeDraft
from pegboard_testing.fake_engine import FakeEngine, expected_tokens
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.fake_policy import FakePolicy

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
LAYERS: list[list[Retain]] = [
    [Full()],
    [Full(), Window(6)],
    [State(checkpoint_every=4)],
    [Full(), State(checkpoint_every=4)],
]


def request(
    request_id: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: Any
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=list(prompt), params=params, **fields
    )


def run(
    engine: FakeEngine, requests: Sequence[EngineRequest], abort: tuple[int, list[str]] = (-1, [])
) -> None:
    """Add the requests, abort some before step number abort[0], and check all answers and that
    everything is released."""
    for each in requests:
        engine.engine.add(each)
    for _ in range(abort[0]):
        engine.step()
    engine.engine.abort(abort[1])
    engine.run()
    engine.check_results({each.request_id: each for each in requests})
    assert len(engine.results) == sum(each.params.n for each in requests)
    engine.check_idle()


# --- loads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["in_step", "between_steps"])
@pytest.mark.parametrize("retains", LAYERS[:2])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_abort_in_any_step_of_a_load_that_fails_or_not(
    load: Any, retains: list[Retain], max_in_flight: int
) -> None:
    store: dict[Any, Any] = {}
    FakeEngine(retains, kv=FakeKV(load, store)).generate(range(21), GREEDY)
    for step in range(6):
        for first_bad in (None, 0, 9, 16):
            engine = FakeEngine(
                retains,
                kv=FakeKV(load, store, fails=lambda key, bad=first_bad: bad),
                max_in_flight=max_in_flight,
            )
            run(
                engine,
                [request("a", range(21)), request("b", range(30, 40)), request("c", range(21))],
                (step, ["a"]),
            )


@pytest.mark.parametrize("load", ["in_step", "between_steps"])
def test_a_request_of_the_same_name_follows_an_aborted_one_whose_load_is_open(load: Any) -> None:
    store: dict[Any, Any] = {}
    FakeEngine(kv=FakeKV(load, store)).generate(range(21), GREEDY)
    for step in range(5):
        for first_bad in (None, 9):
            engine = FakeEngine(kv=FakeKV(load, store, fails=lambda key, bad=first_bad: bad))
            engine.add("a", range(21), GREEDY)
            for _ in range(step):
                engine.step()
            engine.engine.abort(["a"])
            engine.step()
            engine.results.clear()
            run(engine, [request("a", range(21))])


@pytest.mark.parametrize("spare_blocks", range(9))
@pytest.mark.parametrize("priorities", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_request_that_cannot_go_on_takes_what_was_loaded_for_others(
    spare_blocks: int, priorities: tuple[int, ...]
) -> None:
    """Never its own blocks, whether it is the first or the last one that was added."""
    store: dict[Any, Any] = {}
    prompts = [range(start, start + 21) for start in (0, 10, 20)]
    for prompt in prompts:
        FakeEngine(kv=FakeKV("between_steps", store)).generate(prompt, GREEDY)
    settings: dict[str, Any] = {
        "enable_prefix_caching": False,
        "by_priority": True,
        "spare_blocks": spare_blocks,
    }
    engine = FakeEngine(kv=FakeKV("between_steps", store), max_model_len=32, **settings)
    run_short(engine, [request(f"r{i}", prompts[i], priority=priorities[i]) for i in range(3)])


class Connector:
    """The scheduler half. matches: what `match` returns, without regard to what is local. later:
    whether blocks are still read."""

    def __init__(self, matches: Match | None = None) -> None:
        self.matches = matches or Match(0)
        self.later = True

    def match(self, view: RequestView, num_local_tokens: int) -> Match | None:
        return self.matches

    def released(self, view: RequestView, blocks: BlockView, why: str) -> Release:
        return Release(later=self.later)

    def update(self, reports: Sequence[TransferReport]) -> None:
        """Nothing to learn."""


@given(st.integers(1, 12), st.data())
def test_no_external_prefix_reaches_the_last_token(num_tokens: int, data: st.DataObject) -> None:
    """However long the match is. The first connector with a match wins."""
    local = data.draw(st.integers(0, num_tokens - 1))
    lengths = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=3))
    engine = FakeEngine()
    chain = {f"c{i}": Connector(Match(length, "in_step")) for i, length in enumerate(lengths)}
    connectors = KVConnectors(chain, engine.engine._live.kv)  # type: ignore[arg-type]
    engine.add("a", range(num_tokens), GREEDY)
    found = connectors.find(engine.engine._live._by_key["a"], local)
    assert found is not None
    room = num_tokens - 1 - local
    first = next((i for i, length in enumerate(lengths) if length), None)
    if first is None or not room:
        assert (found.match.num_tokens, found.winner) == (0, None)
    else:
        assert (found.match.num_tokens, found.winner) == (min(lengths[first], room), f"c{first}")


@given(st.lists(st.integers(0, 15), min_size=1, max_size=4))
def test_only_the_connector_that_won_loads(lengths: list[int]) -> None:
    engine = FakeEngine()
    loads = dict[str, int]()
    chain: dict[str, Any] = {
        f"c{i}": Connector(Match(length, "in_step")) for i, length in enumerate(lengths)
    }
    for name, connector in chain.items():
        connector.allocated = lambda request, blocks, num_tokens, name=name: loads.update(
            {name: num_tokens}
        )
    connectors = KVConnectors(chain, engine.engine._live.kv)
    engine.add("a", range(20), GREEDY)
    wanted = engine.engine._live._by_key["a"]
    found = connectors.find(wanted, 0)
    assert found is not None and engine.engine._live.kv.allocate(wanted, 20) is not None
    connectors.allocated(wanted, found)
    first = next((i for i, length in enumerate(lengths) if length), None)
    assert loads == {f"c{i}": length if i == first else 0 for i, length in enumerate(lengths)}


@given(
    st.lists(
        st.tuples(st.sampled_from(["end", "report"]), st.sampled_from("ab"), st.booleans()),
        max_size=16,
    )
)
def test_blocks_stay_pinned_until_each_of_the_open_saves_is_reported(
    actions: list[tuple[str, str, bool]],
) -> None:
    """Requests of one name may follow each other while the connector still reads the blocks of the
    first."""
    engine = FakeEngine(max_num_seqs=2)
    kv = engine.engine._live.kv
    connector = Connector()
    connectors = KVConnectors({"c": connector}, kv)  # type: ignore[dict-item]
    pinned: list[tuple[str, int]] = []
    total = kv.pool.num_free
    for number, (action, key, later) in enumerate(actions):
        if action == "end":
            engine.add(key, range(number, number + 9), GREEDY)
            ended = engine.engine._live._by_key[key]
            kv.allocate(ended, 4 * (1 + number % 3))
            connector.later = later
            connectors.released(ended, "finished")
            kv.release(ended)
            engine.engine.abort([key])
            pinned += [(key, 1 + number % 3)] * later
        else:
            connectors.update({"c": TransferReport(saved=[key])})
            oldest = next((entry for entry in pinned if entry[0] == key), None)
            pinned = [entry for entry in pinned if entry is not oldest] if oldest else pinned
        assert total - kv.pool.num_free == sum(count for _, count in pinned)
        assert connectors.has_open == bool(pinned)


def test_a_prefix_that_finds_no_blocks_now_is_loaded_later() -> None:
    """While another request holds the blocks, this one waits, and does not give its connector
    up."""
    store: dict[tuple[int, int, bytes], Any] = {}
    settings: dict[str, Any] = {
        "kv": FakeKV("between_steps", store),
        "max_model_len": 32,
        "spare_blocks": 0,
    }
    FakeEngine(**settings).generate(range(24), GREEDY)
    engine = FakeEngine(**settings)
    engine.add(
        "first", range(30, 54), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    )
    engine.step()
    engine.add("second", range(24), GREEDY)
    results = engine.run()
    assert results["first", 0].finish_reason == "length"
    assert results["second", 0].deltas[0].num_cached_tokens == 20
    engine.check_idle()


# --- completions of one request -------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("retains", [*LAYERS, [Window(5)]])
@pytest.mark.parametrize("spare_blocks", [0, 3, 30])
def test_a_completion_is_aborted_in_any_step(retains: list[Retain], spare_blocks: int) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=7)
    for aborted in (["0_a"], ["1_a"], ["3_a"], ["0_a", "2_a"], ["a"]):
        for step in range(8):
            engine = FakeEngine(
                retains, spare_blocks=spare_blocks, max_num_seqs=3, max_num_batched_tokens=9
            )
            run(engine, [request("a", range(17), params), request("b", range(5))], (step, aborted))


@pytest.mark.parametrize("load", ["in_step", "between_steps"])
@pytest.mark.parametrize("spare_blocks", [0, 3, 30])
def test_a_connector_is_told_of_the_blocks_of_every_completion(
    load: Any, spare_blocks: int
) -> None:
    """The fake one refuses to release blocks that it was not told of."""
    engine = FakeEngine(kv=FakeKV(load), spare_blocks=spare_blocks)
    run(
        engine,
        [
            request("a", range(17), SamplingParams(n=4, seed=3, max_tokens=7)),
            request("b", range(17)),
        ],
    )


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_every_completion_has_the_settings_of_its_request(max_num_seqs: int) -> None:
    """Also those that wait, and both forms of a bad word. Only the seeds differ."""
    engine = FakeEngine(max_num_seqs=max_num_seqs)
    params = SamplingParams(
        n=4,
        seed=7,
        max_tokens=3,
        min_tokens=1,
        logit_bias={3: -1.0},
        repetition_penalty=1.2,
        stop_token_ids=[1],
    ).clone(bad_words_token_ids=[[4, 5], [6, 5], [5]])
    engine.engine.add(request("a", range(9), params))
    engine.run()
    rows = [new for batch in engine.executor.batches for new in batch.new]
    assert {new.seed for new in rows} == {7, 8, 9, 10}
    for new in rows:
        assert new.params.clone(n=4) == params


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("waiting", range(4))
def test_as_many_completions_as_may_wait_are_taken_and_no_more(n: int, waiting: int) -> None:
    engine = FakeEngine(max_num_queued_reqs=4)
    for number in range(waiting):
        engine.add(f"w{number}", [3], GREEDY)
    if waiting + n <= 4:
        engine.add("a", [3], SamplingParams(n=n, max_tokens=2))
    else:
        with pytest.raises(Exception, match="n must be at most 4|limit is 4"):
            engine.add("a", [3], SamplingParams(n=n, max_tokens=2))
    engine.run()
    engine.check_idle()


# --- adapters and names of blocks -----------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_adapter_is_reloaded_while_its_request_is_preempted(max_in_flight: int) -> None:
    """What the request computed before has the names of the old files. The invariants compare its
    names with its adapter."""
    for step in range(12):
        engine = FakeEngine(
            max_loras=2, max_cpu_loras=2, spare_blocks=2, max_in_flight=max_in_flight
        )
        lora = LoRARequest("x", 1, "/1")
        params = SamplingParams(temperature=0.0, max_tokens=24)
        requests = [request(f"r{i}", range(i, i + 13), params, lora=lora) for i in range(3)]
        for each in requests:
            engine.engine.add(each)
        for _ in range(step):
            engine.step()
        engine.ask(ResetPrefixCache(reset_running_requests=True))
        engine.worker.versions["/1"] = "2"
        engine.engine.add(
            request("new", range(13), params, lora=msgspec.structs.replace(lora, load_inplace=True))
        )
        engine.run()
        engine.check_results(
            {
                each.request_id: each
                for each in [*requests, request("new", range(13), params, lora=lora)]
            }
        )
        engine.check_idle()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_adapter_is_reloaded_while_completions_wait(max_in_flight: int) -> None:
    """They cannot start from the prompt that the old files computed. The invariants compare those
    who share blocks."""
    lora = LoRARequest("x", 1, "/1")
    params = SamplingParams(temperature=0.0, max_tokens=9)
    for step in range(10):
        engine = FakeEngine(
            max_loras=2, max_cpu_loras=2, max_num_seqs=2, max_in_flight=max_in_flight
        )
        several = request("a", range(13), SamplingParams(n=4, seed=3, max_tokens=12), lora=lora)
        requests = [
            request("b", range(5), SamplingParams(temperature=0.0, max_tokens=1 + step)),
            several,
        ]
        for each in requests:
            engine.engine.add(each)
        for _ in range(step):
            engine.step()
        engine.worker.versions["/1"] = "2"
        engine.engine.add(
            request("new", range(13), params, lora=msgspec.structs.replace(lora, load_inplace=True))
        )
        engine.run()
        engine.check_results(
            {
                each.request_id: each
                for each in [*requests, request("new", range(13), params, lora=lora)]
            }
        )
        engine.check_idle()


class Recorder:
    """A metrics sink that keeps the events of the prefix cache."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    def declare(self, metrics: Sequence[Metric]) -> None:
        """Nothing to learn."""

    def publish(self, sample: Sample) -> None:
        self.events += sample.kv_events

    def close(self) -> None:
        """Nothing to flush."""


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([None, "x", "y"]), st.integers(1, 19)), min_size=1, max_size=4
    ),
    st.sampled_from([2, 4]),
)
def test_events_name_blocks_that_anybody_can_compute(
    prompts: list[tuple[str | None, int]], block_size: int
) -> None:
    """The salt is told with the first block of a chain and no other, because it is in that block's
    name only."""
    recorder = Recorder()
    engine = FakeEngine(
        block_size=block_size,
        metrics=[recorder],
        reports_kv_events=True,
        max_num_batched_tokens=8,
    )
    for number, (salt, length) in enumerate(prompts):
        engine.add(f"r{number}", range(length), GREEDY, cache_salt=salt)
    engine.run()
    salts = set()
    for event in recorder.events:
        assert isinstance(event, BlocksStored) and (
            event.cache_salt is None or event.parent_hash is None
        )
        parent = event.parent_hash or root_hash("")
        tokens = event.token_ids
        for start, name in zip(range(0, len(tokens), block_size), event.block_hashes, strict=True):
            has_salt = start == 0 and event.cache_salt is not None
            extra = (
                msgspec.msgpack.encode([[0, 1, ["salt", event.cache_salt]]]) if has_salt else b""
            )
            assert name == sha256_block(parent, tokens[start : start + block_size], extra)
            parent = name
        salts |= {event.cache_salt} if event.parent_hash is None else set()
    assert salts == {salt for salt, length in prompts if length + GREEDY.max_tokens > block_size}


# --- scarcity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
@pytest.mark.parametrize("more_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_drafts_fit_what_the_rows_leave_of_the_budget(
    max_num_seqs: int, more_tokens: int, max_in_flight: int
) -> None:
    engine = FakeEngine(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + more_tokens,
        max_in_flight=max_in_flight,
        max_drafts=3,
        draft=partial(FakeDraft, accuracy=0.6),
    )
    run(
        engine,
        [
            request(f"r{i}", range(i, 2 * i + 3), SamplingParams(temperature=0.0, max_tokens=20))
            for i in range(6)
        ],
    )
    assert (
        max(batch.num_tokens for batch in engine.executor.batches)
        == engine.limits.max_num_batched_tokens
    )


@pytest.mark.parametrize("spare_blocks", range(5))
def test_without_chunked_prefill_a_preempted_request_may_be_longer_than_a_step(
    spare_blocks: int,
) -> None:
    """It goes on in chunks, because no step could take it whole."""
    settings: dict[str, Any] = {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 8,
        "enable_prefix_caching": False,
    }
    engine = FakeEngine(spare_blocks=spare_blocks, max_model_len=32, **settings)
    run_short(
        engine,
        [
            request(f"r{i}", range(i, i + 7), SamplingParams(temperature=0.0, max_tokens=20))
            for i in range(3)
        ],
    )


class Turning(FakePolicy):
    """Takes the blocks of any running request, at first: `places` says which. Later the last one
    gives way, so that all end."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__(
            SchedulingPolicySetup(fake_limits(max_num_seqs=4, max_num_batched_tokens=32))
        )
        self._places = list(places)

    def victim(self, running: Sequence[RequestView], need: RequestView) -> RequestView | None:
        return (
            running[self._places.pop(0) % len(running)]
            if self._places
            else super().victim(running, need)
        )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.sampled_from(LAYERS),
    st.integers(0, 6),
    st.integers(1, 3),
)
def test_any_running_request_may_be_the_victim(
    places: list[int], retains: list[Retain], spare_blocks: int, max_in_flight: int
) -> None:
    """Also one before the request that needs the blocks, which is in the plan of the step
    already."""
    engine = FakeEngine(
        retains,
        spare_blocks=spare_blocks,
        policy=Turning(places),
        max_in_flight=max_in_flight,
        max_model_len=32,
    )
    params = SamplingParams(temperature=0.0, max_tokens=18)
    run_short(engine, [request(f"r{i}", range(i, i + 6), params) for i in range(5)])


budgets = st.builds(
    StepBudget, st.integers(1, 40), st.integers(0, 12), st.integers(0, 3), st.integers(0, 2)
)


class Moody(FakePolicy):
    """Its first budgets are `budgets`."""

    def __init__(self, budgets: Sequence[StepBudget]) -> None:
        super().__init__(
            SchedulingPolicySetup(fake_limits(max_num_seqs=6, max_num_batched_tokens=24))
        )
        self._budgets = list(budgets)

    def budget(self, load: StepLoad) -> StepBudget:
        return self._budgets.pop(0) if self._budgets else super().budget(load)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(budgets, max_size=12),
    st.lists(st.integers(1, 20), min_size=1, max_size=7),
    st.integers(0, 9),
    st.integers(1, 2),
)
def test_the_budget_of_each_step_is_kept(
    budgets: list[StepBudget], lengths: list[int], spare_blocks: int, max_in_flight: int
) -> None:
    """Whatever a policy returns. The invariants compare every batch with its budget."""
    engine = FakeEngine(
        policy=Moody(budgets),
        spare_blocks=spare_blocks,
        max_in_flight=max_in_flight,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=32,
    )
    run_short(engine, [request(f"r{i}", range(i, i + length)) for i, length in enumerate(lengths)])


class Earliest(FakePolicy):
    """Takes the blocks of the first running request that is not the one in need. victims: their
    ids. Its budget is larger than the engine's limit."""

    def __init__(self) -> None:
        super().__init__(SchedulingPolicySetup(fake_limits()))
        self.victims: list[str] = []

    def victim(self, running: Sequence[RequestView], need: RequestView) -> RequestView | None:
        found = next((each for each in running if each is not need), need)
        self.victims.append(found.request_id)
        return found


@pytest.mark.parametrize("spare_blocks", range(8))
@pytest.mark.parametrize("retains", LAYERS[:2])
def test_no_running_request_misses_a_step_because_an_earlier_one_left(
    retains: list[Retain], spare_blocks: int
) -> None:
    policy = Earliest()
    engine = FakeEngine(
        retains,
        spare_blocks=spare_blocks,
        policy=policy,
        max_in_flight=1,
        max_model_len=32,
    )
    for i in range(5):
        engine.add(f"r{i}", range(i, i + 6), SamplingParams(temperature=0.0, max_tokens=18))
    queues = engine.engine._live
    num_victims = 0
    while engine.engine.has_work:
        before = list(queues.running)
        engine.step()
        taken = policy.victims[num_victims:]
        num_victims += len(taken)
        rows = set(engine.executor.batches[-1].rows.tolist())
        missed = [
            each.request_id for each in before if each in queues.running and each.row not in rows
        ]
        assert not missed, f"{missed} could run, and {taken} had to give their blocks"
    assert num_victims or spare_blocks > 4


def run_short(engine: FakeEngine, requests: Sequence[EngineRequest]) -> None:
    for each in requests:
        engine.engine.add(each)
    engine.run()
    for each in requests:
        tokens, reason = expected_tokens(
            engine.model, each, max_model_len=engine.limits.max_model_len
        )
        result = engine.results[each.request_id, 0]
        assert (result.token_ids, result.finish_reason) == (tokens, reason)
    engine.check_idle()


@pytest.mark.parametrize("retains", LAYERS)
@pytest.mark.parametrize("num_tokens", [9, 12, 17])
def test_a_hit_takes_its_blocks_or_nothing_with_any_number_of_free_blocks(
    retains: list[Retain], num_tokens: int
) -> None:
    """Also with exactly as many as the hit and the rest need. The source of a state's copy is one
    of them."""
    taken = []
    for num_left in range(16):
        engine = FakeEngine(retains, num_blocks=24, max_model_len=24)
        engine.generate(range(17), GREEDY)
        kv = engine.engine._live.kv
        assert kv.pool.take(kv.pool.num_free - num_left) is not None
        engine.add("b", range(num_tokens), GREEDY)
        wanted = engine.engine._live._by_key["b"]
        hit = kv.lookup(wanted)
        references = list(kv.pool._num_refs)
        tables = kv.allocate(wanted, num_tokens, hit=hit, num_computed_tokens=hit.num_tokens)
        shared = [block_id for table in hit.block_ids for block_id in table if block_id]
        if tables is None:
            assert kv.pool._num_refs == references and not kv.holds(wanted) and not kv.take_copies()
            continue
        own = [block_id for table in tables for block_id in table if block_id]
        held = {*own, *shared}
        assert kv.pool.num_free == num_left - len(held) and all(
            kv.pool._num_refs[block_id] == 1 for block_id in held
        )
        taken.append(num_left - len(held))
        kv.copies_done(kv.take_copies())
        kv.release(wanted)
        assert kv.pool.num_free == num_left
    assert min(taken) == 0 or Window(6) in retains, (
        "it was refused although there were enough blocks"
    )
