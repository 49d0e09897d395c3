"""Adapters in the engine: what is read, what has a slot, what is pinned, removed and reloaded."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.data.request import EngineRequest, LoRARequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine import loras
from pegboard.engine.actions import AddLoRA, ListLoRAs, PinLoRA, RemoveLoRA, action_of
from pegboard.errors import RequestError
from pegboard_testing.fake_engine import FakeEngine, expected_tokens


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


GREEDY = greedy(4)


def adapter(number: int, **fields: Any) -> LoRARequest:
    return LoRARequest(f"lora{number}", number, f"/{number}", **fields)


def reads(engine: FakeEngine) -> list[int]:
    """Return the ids of the adapters in the order in which their files were read."""
    tickets = {
        args[0]: args[1].lora_int_id
        for method, args in engine.executor.calls
        if method == "read_adapter"
    }
    return list(tickets.values())


ACTIONS = st.one_of(
    st.tuples(st.just("request"), st.integers(0, 4), st.integers(1, 12), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["add_lora", "pin_lora", "remove_lora"]), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        (("", 1, "/p"), "lora_name"),
        (("x", 0, "/p"), "lora_int_id"),
        (("x", True, "/p"), "lora_int_id"),
        (("x", 1), "lora_path"),
        (("x", 2**63, "/p"), "lora_int_id"),
        ((None, 1, "/p"), "lora_name"),
        (("x", "1", "/p"), "lora_int_id"),
    ],
)
def test_a_wrong_field_is_named(fields: Any, parameter: str) -> None:
    with pytest.raises(RequestError, match=parameter) as raised:
        LoRARequest(*fields)
    assert raised.value.parameter == parameter


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_others_go_on_while_an_adapter_is_read(
    max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "POLL_S", 0.0)
    engine = FakeEngine(max_loras=1, max_in_flight=max_in_flight, max_model_len=64)
    engine.worker.slow_reads = 5
    engine.add("base", range(4), greedy(30))
    engine.step()
    engine.add("slow", range(5), GREEDY, lora=adapter(1))
    while not engine.results.get(("slow", 0)):
        engine.step()
    assert len(engine.results["base", 0].token_ids) >= 4
    engine.run()
    engine.check_idle()


def test_more_adapters_than_memory_are_read_again() -> None:
    engine = FakeEngine(max_loras=1, max_cpu_loras=2)
    for number in (1, 2, 1, 3, 1, 2):
        engine.generate(range(number, number + 4), GREEDY, lora=adapter(number))
    assert reads(engine) == [1, 2, 3, 2]
    assert set(engine.worker.read.values()) == {1, 2}, "the workers keep what the engine keeps"


def test_a_pinned_adapter_stays() -> None:
    engine = FakeEngine(max_loras=2)
    for number in (1, 2):
        engine.generate(range(4), GREEDY, lora=adapter(number))
    assert engine.ask(PinLoRA(lora_id=1))
    for number in (3, 4, 1):
        engine.generate(range(4), GREEDY, lora=adapter(number))
    assert reads(engine) == [1, 2, 3, 4]
    assert engine.ask(ListLoRAs()) == {1, 4}
    with pytest.raises(RequestError, match="no adapter with the id 9"):
        engine.ask(PinLoRA(lora_id=9))


def test_with_all_slots_pinned_another_adapter_is_an_error_and_not_a_wait() -> None:
    engine = FakeEngine(max_loras=1, max_cpu_loras=2)
    engine.generate(range(4), GREEDY, lora=adapter(1))
    engine.ask(PinLoRA(lora_id=1))
    result = engine.generate(range(4), GREEDY, lora=adapter(2))
    assert result.finish_reason == "error" and "pinned" in result.deltas[-1].error
    with pytest.raises(RequestError, match="all 1 slots are pinned"):
        engine.ask(PinLoRA(lora_id=2))
    assert engine.ask(RemoveLoRA(lora_id=1))
    assert engine.generate(range(4), GREEDY, lora=adapter(2)).finish_reason == "length"


def test_an_idle_engine_drops_what_is_removed_or_replaced() -> None:
    """No step comes after that, which would drop it."""
    engine = FakeEngine(max_loras=1, max_cpu_loras=2)
    for number in (1, 2, 3):
        assert engine.ask(AddLoRA(lora_request=adapter(number)))
    assert sorted(engine.worker.read.values()) == [2, 3]
    assert engine.ask(RemoveLoRA(lora_id=2))
    assert list(engine.worker.read.values()) == [3]


def test_without_room_adding_is_refused() -> None:
    engine = FakeEngine(max_loras=1, max_cpu_loras=1)
    engine.generate(range(4), GREEDY, lora=adapter(1))
    engine.ask(PinLoRA(lora_id=1))
    with pytest.raises(RequestError, match="max_cpu_loras=1"):
        engine.ask(AddLoRA(lora_request=adapter(2)))
    result = engine.generate(range(4), GREEDY, lora=adapter(2))
    assert result.finish_reason == "error" and "pinned" in result.deltas[-1].error


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_adapter_removed_in_flight_serves_its_requests_and_then_frees_its_slot(
    max_in_flight: int,
) -> None:
    engine = FakeEngine(max_loras=1, max_in_flight=max_in_flight)
    engine.add("old", range(4), greedy(9), lora=adapter(1))
    engine.step()
    assert engine.ask(RemoveLoRA(lora_id=1)) and not engine.ask(RemoveLoRA(lora_id=1))
    assert engine.ask(ListLoRAs()) == set()
    engine.add("new", range(4), greedy(9), lora=adapter(2))
    engine.run()
    assert len(engine.results["old", 0].token_ids) == len(engine.results["new", 0].token_ids) == 9
    assert list(engine.worker.read.values()) == [2]
    engine.check_idle()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_reload_reads_again_and_shares_no_blocks_with_the_old_one(max_in_flight: int) -> None:
    engine = FakeEngine(max_loras=2, max_in_flight=max_in_flight)
    prompt = range(12)
    engine.generate(prompt, GREEDY, lora=adapter(1))
    assert engine.generate(prompt, GREEDY, lora=adapter(1)).deltas[0].num_cached_tokens > 0
    engine.worker.versions["/1"] = "2"
    assert (
        engine.generate(prompt, GREEDY, lora=adapter(1, load_inplace=True))
        .deltas[0]
        .num_cached_tokens
        == 0
    )
    assert engine.generate(prompt, GREEDY, lora=adapter(1)).deltas[0].num_cached_tokens > 0
    assert engine.ask(AddLoRA(lora_request=adapter(1, load_inplace=True)))
    assert reads(engine) == [1, 1, 1]
    assert engine.generate(prompt, GREEDY, lora=adapter(1)).deltas[0].num_cached_tokens > 0, (
        "the same files, the same blocks"
    )


def test_workers_are_asked_no_more_often_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(
        loras, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    )
    engine = FakeEngine(max_loras=1)
    engine.worker.slow_reads = 99
    engine.add("base", range(4), greedy(40))
    engine.add("lora", range(4), GREEDY, lora=adapter(1))
    for number in range(1, 4):
        for _ in range(5):
            engine.step()
        assert list(engine.worker.asked.values()) == [number]
        now[0] += loras.POLL_S
    engine.engine.abort(["lora"])
    engine.run()


def test_an_adapter_that_waits_for_a_slot_gets_its_turn() -> None:
    """Requests of an adapter that is in use come in all the time. MAX_BYPASSES of them go first,
    and no more."""
    engine = FakeEngine(max_loras=1, max_num_seqs=2, num_blocks=99)
    engine.add("first", range(4), greedy(3), lora=adapter(1))
    engine.step()
    engine.add("waits", range(4), greedy(3), lora=adapter(2))
    for number in range(3 * loras.MAX_BYPASSES):
        engine.add(f"more{number}", range(4), greedy(3), lora=adapter(1))
        engine.step()
    engine.run()
    order = [name for name, _ in engine.results]
    assert order[: loras.MAX_BYPASSES + 2] == [
        "first",
        *(f"more{n}" for n in range(loras.MAX_BYPASSES)),
        "waits",
    ]
    engine.check_idle()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_slot_goes_to_the_first_in_the_order_of_priorities(num_slots: int) -> None:
    engine = FakeEngine(
        by_priority=True, max_loras=num_slots, max_num_seqs=num_slots, num_blocks=99
    )
    for number in range(num_slots):
        engine.add(f"first{number}", range(4), greedy(6), lora=adapter(1 + number))
    engine.step()
    for number, priority in ((5, 2), (6, 0), (7, 1)):
        engine.add(f"lora{number}", range(4), greedy(3), lora=adapter(number), priority=priority)
    engine.run()
    assert [name for name, _ in engine.results][num_slots:] == ["lora6", "lora7", "lora5"]
    engine.check_idle()


def test_an_aborted_request_gives_up_its_turn() -> None:
    engine = FakeEngine(max_loras=1, max_num_seqs=2)
    engine.add("first", range(4), greedy(9), lora=adapter(1))
    engine.step()
    engine.add("waits", range(4), GREEDY, lora=adapter(2))
    engine.step()
    engine.engine.abort(["waits"])
    for number in range(2 * loras.MAX_BYPASSES):
        assert engine.generate(range(4), greedy(1), lora=adapter(1)).finish_reason == "length", (
            number
        )


def test_without_lora_there_is_nothing_to_add() -> None:
    with pytest.raises(RequestError, match="LoRA is off"):
        FakeEngine().engine.control(AddLoRA(lora_request=adapter(1))).result(0)


def test_an_adapter_that_is_added_and_one_of_a_request_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is memory for one, and reading takes some steps."""
    monkeypatch.setattr(loras, "POLL_S", 0.0)
    engine = FakeEngine(max_loras=1, max_cpu_loras=1)
    engine.worker.slow_reads = 2
    request = EngineRequest(
        request_id="r", prompt_token_ids=[2] * 3, params=GREEDY, lora=adapter(2)
    )
    engine.engine.add(request)
    engine.step()
    assert engine.ask(AddLoRA(lora_request=adapter(1)))
    engine.run()
    assert engine.results["r", 0].token_ids == expected_tokens(engine.model, request)[0]


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=5, max_size=30),
    max_loras=st.integers(1, 2),
    more_read=st.integers(0, 2),
    max_in_flight=st.integers(1, 2),
    spare_blocks=st.integers(0, 20),
    slow_reads=st.integers(0, 2),
)
def test_any_order_of_use_pins_reloads_and_removals(
    actions: list[tuple[Any, ...]],
    max_loras: int,
    more_read: int,
    max_in_flight: int,
    spare_blocks: int,
    slow_reads: int,
) -> None:
    """Every request ends with the tokens that it has alone, or with an error if all slots are
    pinned. Then everything is free."""
    engine = FakeEngine(
        max_loras=max_loras,
        max_cpu_loras=max_loras + more_read,
        max_in_flight=max_in_flight,
        spare_blocks=spare_blocks,
    )
    engine.worker.slow_reads = slow_reads
    requests: list[EngineRequest] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loras, "POLL_S", 0.0)
        for action, *arguments in actions:
            _act(engine, requests, action, arguments)
        engine.run()
    for request in requests:
        result = engine.results[request.request_id, 0]
        tokens, reason = expected_tokens(engine.model, request)
        if result.finish_reason == "error":
            assert "pinned" in str(result.deltas[-1].error)
        elif result.finish_reason == "abort":
            assert result.token_ids == tokens[: len(result.token_ids)]
        else:
            assert (result.token_ids, result.finish_reason) == (tokens, reason)
    slots = engine.engine._loras
    assert not any(adapter.num_users for adapter in slots._adapters.values())
    # one that was being read when its request was aborted is not in list_loras
    for number in range(1, 5):
        engine.ask(RemoveLoRA(lora_id=number))
    assert sorted(slots._free) == list(range(1, max_loras + 1)) and not slots._adapters
    engine.check_idle()


def _act(
    engine: FakeEngine, requests: list[EngineRequest], action: str, arguments: list[Any]
) -> None:
    if action == "request":
        number, length, is_reload = arguments
        lora = adapter(number, load_inplace=is_reload) if number else None
        requests.append(
            EngineRequest(
                request_id=f"r{len(requests)}",
                prompt_token_ids=[number] * length,
                params=GREEDY,
                lora=lora,
            )
        )
        engine.engine.add(requests[-1])
    elif action == "step":
        for _ in range(arguments[0]):
            engine.step()
    elif action == "abort":
        engine.engine.abort([f"r{arguments[0]}"])
    elif action == "add_lora":
        with contextlib.suppress(RequestError):  # all adapters in memory are in use or pinned
            engine.ask(AddLoRA(lora_request=adapter(arguments[0])))
    else:
        with contextlib.suppress(RequestError):  # it is not loaded, or all slots are pinned
            engine.ask(action_of(action, {"lora_id": arguments[0]}))
