"""Pauses and sleep of the engine: what becomes of requests, and which calls the workers get."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import RequestError
from pegboard_testing.fake_engine import FakeEngine


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def answer(prompt: range, max_tokens: int = 12) -> list[int]:
    return FakeEngine().generate(prompt, greedy(max_tokens)).token_ids


def until(engine: FakeEngine, action: str, **arguments: Any) -> None:
    """Repeat an action until the engine has stopped."""
    for _ in range(200):
        if engine.engine.control(action, **arguments):
            return
        engine.step()
    raise AssertionError(f"{action} never ended")


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
        max_in_flight=max_in_flight, max_drafts=max_drafts, kv_load=kv_load, can_sleep=True
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
    assert engine.engine.control("is_paused") and engine.engine.control("is_sleeping") is (
        action == "sleep"
    )
    if action == "sleep" or clears:
        stats = engine.engine.stats()
        assert stats["num_cached_blocks"] == 0 and stats["blocks_of"] == {}
    if action == "sleep":
        assert engine.engine.control("wake_up")
    else:
        engine.engine.control("resume")
    results = engine.run()
    for name, prompt in prompts.items():
        result = results[name, 0]
        if result.finish_reason == "abort":
            assert mode == "abort" and name.startswith("before")
            assert result.token_ids == answer(prompt)[: len(result.token_ids)]
        else:
            assert result.token_ids == answer(prompt), name
    assert not engine.engine.control("is_paused")


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
    engine.engine.control("resume")
    assert not engine.engine.has_work


def test_the_memory_comes_back_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(can_sleep=True)
    calls = []
    monkeypatch.setattr(engine.worker, "call", lambda method, *args: calls.append((method, *args)))
    until(engine, "sleep", level=2)
    with pytest.raises(RequestError, match="wake_up"):
        engine.engine.control("resume")
    with pytest.raises(RequestError, match="sleeps already"):
        engine.engine.control("sleep")
    with pytest.raises(RequestError, match="unknown tag 'kv'"):
        engine.engine.control("wake_up", tags=["kv"])
    assert not engine.engine.control("wake_up", tags=["weights"]) and engine.engine.control(
        "is_sleeping"
    )
    assert engine.engine.control("wake_up", tags=["kv_cache"]) and not engine.engine.control(
        "is_sleeping"
    )
    assert calls == [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert engine.engine.control("wake_up"), "it is awake"


def test_sleep_needs_its_setting_and_known_values() -> None:
    engine = FakeEngine().engine
    for arguments, told in (
        ({"level": 1}, "enable_sleep_mode"),
        ({"level": 3}, "level must be"),
        ({"level": 0, "mode": "x"}, "mode"),
    ):
        with pytest.raises(RequestError, match=told):
            engine.control("sleep", **arguments)
        assert not engine.control("is_paused")
    assert (
        engine.control("sleep", level=0)
        and engine.control("is_sleeping")
        and engine.control("wake_up")
    )


def test_workers_that_cannot_sleep_leave_the_engine_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(can_sleep=True)

    def refuse(method: str, *args: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(engine.worker, "call", refuse)
    with pytest.raises(OSError, match="no room"):
        engine.engine.control("sleep")
    assert not engine.engine.control("is_paused")
    assert engine.generate(range(9), greedy()).token_ids == answer(range(9))
