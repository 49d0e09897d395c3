"""Pauses and sleep of the engine: what becomes of requests, and which calls the workers get."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.actions import (
    IsPaused,
    IsSleeping,
    Pause,
    Resume,
    Sleep,
    UpdateWeights,
    WakeUp,
    action_of,
)
from pegboard.errors import RequestError
from pegboard_testing.fake_connectors import FakeKV
from pegboard_testing.fake_engine import FakeEngine


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def answer(prompt: range, max_tokens: int = 12) -> list[int]:
    return FakeEngine().generate(prompt, greedy(max_tokens)).token_ids


def until(engine: FakeEngine, action: str, **arguments: Any) -> None:
    engine.ask(action_of(action, arguments))


def drain(engine: FakeEngine) -> None:
    while engine.engine.has_work:
        engine.step()


@settings(deadline=None, max_examples=60)
@given(
    mode=st.sampled_from(["abort", "wait", "keep"]),
    action=st.sampled_from(["pause", "sleep"]),
    clears=st.booleans(),
    steps=st.integers(0, 8),
    max_in_flight=st.integers(1, 2),
    max_drafts=st.sampled_from([0, 2]),
    kv_load=st.sampled_from([None, "in_step", "between_steps"]),
)
def test_every_request_gets_its_answer_or_is_aborted(
    mode: str,
    action: str,
    clears: bool,
    steps: int,
    max_in_flight: int,
    max_drafts: int,
    kv_load: Any,
) -> None:
    engine = FakeEngine(
        max_in_flight=max_in_flight,
        max_drafts=max_drafts,
        kv=kv_load and FakeKV(kv_load),
        parts={"can_sleep": True},
    )
    prompts = {f"before {i}": range(i, i + 9) for i in range(6)} | {
        f"late {i}": range(i + 3, i + 12) for i in range(2)
    }
    for name in list(prompts)[:6]:
        engine.add(name, prompts[name], greedy())
    for _ in range(steps):
        engine.step()
    until(engine, action, mode=mode, **({"clear_cache": clears} if action == "pause" else {}))
    for name in list(prompts)[6:]:
        engine.add(name, prompts[name], greedy())
    drain(engine)
    assert not any(
        engine.results.get((name, 0)) and engine.results[name, 0].token_ids
        for name in list(prompts)[6:]
    )
    assert engine.ask(IsPaused()) and engine.ask(IsSleeping()) is (action == "sleep")
    if action == "sleep" or clears:
        stats = engine.engine.stats()
        assert stats["num_cached_blocks"] == 0 and stats["blocks_of"] == {}
    if action == "sleep":
        assert engine.ask(WakeUp())
    else:
        engine.ask(Resume())
    results = engine.run()
    for name, prompt in prompts.items():
        result = results[name, 0]
        if result.finish_reason == "abort":
            assert mode == "abort" and name.startswith("before")
            assert result.token_ids == answer(prompt)[: len(result.token_ids)]
        else:
            assert result.token_ids == answer(prompt), name
    assert not engine.ask(IsPaused())


def test_a_request_that_waits_for_the_end_of_a_pause_can_be_aborted() -> None:
    engine = FakeEngine()
    until(engine, "pause")
    engine.add("late", range(5), greedy())
    with pytest.raises(RequestError, match="in use"):
        engine.add("late", range(5), greedy())
    assert engine.engine.stats()["num_requests_waiting"] == 1
    engine.engine.abort(["late"])
    drain(engine)
    assert engine.results["late", 0].finish_reason == "abort"
    engine.ask(Resume())
    assert not engine.engine.has_work


def test_the_memory_comes_back_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(parts={"can_sleep": True})
    calls = []
    monkeypatch.setattr(engine.worker, "call", lambda method, *args: calls.append((method, *args)))
    until(engine, "sleep", level=2)
    with pytest.raises(RequestError, match="wake_up"):
        engine.ask(Resume())
    with pytest.raises(RequestError, match="sleeps already"):
        engine.ask(Sleep())
    with pytest.raises(RequestError, match="unknown tag 'kv'"):
        engine.ask(WakeUp(tags=["kv"]))
    assert not engine.ask(WakeUp(tags=["weights"])) and engine.ask(IsSleeping())
    assert engine.ask(WakeUp(tags=["kv_cache"])) and not engine.ask(IsSleeping())
    assert calls == [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert engine.ask(WakeUp()), "it is awake"


def test_sleep_needs_its_setting_and_known_values() -> None:
    engine = FakeEngine()
    for arguments, told in (
        ({"level": 1}, "enable_sleep_mode"),
        ({"level": 3}, "level must be"),
        ({"level": 0, "mode": "x"}, "mode"),
    ):
        with pytest.raises(RequestError, match=told):
            engine.ask(Sleep(**arguments))
        assert not engine.ask(IsPaused())
    engine.ask(Sleep(level=0))
    assert engine.ask(IsSleeping())
    assert engine.ask(WakeUp())


def test_the_end_of_a_pause_is_told_to_who_waits_for_its_beginning() -> None:
    """Otherwise the pause would begin again when its requests have ended."""
    engine = FakeEngine()
    engine.add("a", range(9), greedy())
    engine.step()
    pausing = engine.engine.control(Pause(mode="wait"))
    updating = engine.engine.control(UpdateWeights("/new", mode="wait"))
    engine.step()
    assert not pausing.done() and not updating.done()
    engine.ask(Resume())
    assert engine.run()["a", 0].token_ids == answer(range(9))
    for each in (pausing, updating):
        with pytest.raises(RequestError, match="ended before the engine had stopped"):
            each.result(0)
    assert not engine.ask(IsPaused()) and engine.model.weights == 0


def test_an_idle_engine_has_work_until_an_action_is_done() -> None:
    """Otherwise nobody would call `step`."""
    engine = FakeEngine(kv=FakeKV("between_steps"))
    engine.generate(range(20), greedy())
    action = engine.engine.control(Pause(mode="keep"))
    while not action.done():
        assert engine.engine.has_work
        engine.step()
    assert not engine.engine.has_work and engine.ask(IsPaused())


def test_workers_that_cannot_sleep_leave_the_engine_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(parts={"can_sleep": True})

    def refuse(method: str, *args: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(engine.worker, "call", refuse)
    with pytest.raises(OSError, match="no room"):
        engine.ask(Sleep())
    assert not engine.ask(IsPaused())
    assert engine.generate(range(9), greedy()).token_ids == answer(range(9))
