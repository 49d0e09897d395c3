"""New weights in a running engine: what becomes of requests, and that nothing computed with the old
weights is used again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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
)
from pegboard.errors import EngineDeadError, ModelError, RequestError
from pegboard_testing.fake_connectors import FakeKV
from pegboard_testing.fake_engine import FakeEngine
from pegboard_testing.fake_worker import weights_of


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def answer(weights: str | None, prompt: Sequence[int], max_tokens: int = 12) -> list[int]:
    """The tokens of a new engine with these weights."""
    return list(_answer(weights, tuple(prompt), max_tokens))


@cache
def _answer(weights: str | None, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    engine = FakeEngine()
    engine.model.weights = weights_of(weights) if weights else 0
    return engine.generate(prompt, greedy(max_tokens)).token_ids if max_tokens else []


def update(engine: FakeEngine, name: str, **arguments: Any) -> None:
    engine.ask(UpdateWeights(path=f"/{name}", **arguments))


@settings(deadline=None, max_examples=40)
@given(
    mode=st.sampled_from(["abort", "wait", "keep"]),
    is_paused=st.booleans(),
    steps=st.integers(0, 8),
    max_in_flight=st.integers(1, 2),
    max_drafts=st.sampled_from([0, 2]),
    kv_load=st.sampled_from([None, "in_step", "between_steps"]),
)
def test_tokens_come_from_the_weights_of_their_time(
    mode: str, is_paused: bool, steps: int, max_in_flight: int, max_drafts: int, kv_load: Any
) -> None:
    engine = FakeEngine(
        max_in_flight=max_in_flight, max_drafts=max_drafts, kv=kv_load and FakeKV(kv_load)
    )
    prompts = {f"before {i}": list(range(i, i + 13)) for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, greedy())
    for _ in range(steps):
        engine.step()
    if is_paused:
        engine.ask(Pause(mode="keep", clear_cache=False))
    update(engine, "new", mode=mode)
    assert engine.ask(IsPaused()) is is_paused, "a pause of the user goes on"
    assert engine.model.weights == weights_of("new")
    made = {
        name: list(engine.results[name, 0].token_ids) if (name, 0) in engine.results else []
        for name in prompts
    }
    engine.ask(Resume())
    for name, prompt in list(prompts.items()):
        prompts[late := f"late {name}"] = prompt
        made[late] = []
        engine.add(late, prompt, greedy())
    results = engine.run()
    for name, prompt in prompts.items():
        result = results[name, 0]
        old = made[name]
        before = answer(None, prompt)
        assert old == before[: len(old)]
        if result.finish_reason == "abort":
            assert mode == "abort" and not is_paused and name.startswith("before")
        else:
            # the steps in flight end with the old weights
            last = (
                min(12, len(old) + max_in_flight * (max_drafts + 1))
                if name.startswith("before")
                else 0
            )
            switched = [
                before[:n] + answer("new", [*prompt, *before[:n]], 12 - n)
                for n in range(len(old), last + 1)
            ]
            assert result.token_ids in switched, name


@pytest.mark.parametrize("kv_load", [None, "in_step", "between_steps"])
def test_blocks_have_other_names_per_weights(kv_load: Any) -> None:
    """Engines share what a connector stores. Each finds the blocks of its weights, and only
    those."""
    store: dict[Any, Any] = {}
    prompt = list(range(20))

    def generate(engine: FakeEngine, weights: str | None) -> int:
        """Return how many tokens of the prompt were found."""
        before = engine.engine.stats()
        assert engine.generate(prompt, greedy()).token_ids == answer(weights, prompt)
        after = engine.engine.stats()
        return int(
            after["external_prefix_cache_hits_total"] - before["external_prefix_cache_hits_total"]
        )

    first = FakeEngine(kv=kv_load and FakeKV(kv_load, store))
    second = FakeEngine(kv=kv_load and FakeKV(kv_load, store))
    assert generate(first, None) == 0
    update(second, "new")
    assert generate(second, "new") == 0, "these blocks are of the old weights"
    update(first, "new")
    assert bool(generate(first, "new")) is (kv_load is not None)
    update(first, "other")
    assert generate(first, "other") == 0


def test_a_kept_request_saves_its_blocks_under_new_names() -> None:
    store: dict[Any, Any] = {}
    first = FakeEngine(kv=FakeKV("in_step", store))
    update(first, "a")
    first.add("kept", range(9), greedy())
    for _ in range(5):
        first.step()
    update(first, "b", mode="keep")
    tokens = [*range(9), *first.run()["kept", 0].token_ids]
    second = FakeEngine(kv=FakeKV("in_step", store))
    update(second, "a")
    assert second.generate(tokens, greedy()).token_ids == answer("a", tokens)


def test_what_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(parts={"can_sleep": True})
    engine.add("a", range(9), greedy())
    for _ in range(3):
        engine.step()
    with pytest.raises(RequestError, match="the checkpoint /missing/x does not exist") as caught:
        update(engine, "missing/x")
    assert caught.value.parameter == "path"
    with pytest.raises(RequestError, match="mode must be one of abort, wait, keep"):
        update(engine, "new", mode="now")

    def refuse(method: str, *args: object) -> None:
        raise ModelError("/new lacks 3 tensors")

    with monkeypatch.context() as patch:
        patch.setattr(engine.worker, "call", refuse)
        with pytest.raises(RequestError, match="lacks 3 tensors"):
            update(engine, "new", mode="keep")
    assert not engine.ask(IsPaused())
    assert engine.run()["a", 0].token_ids == answer(None, range(9))
    engine.ask(Sleep())
    with pytest.raises(RequestError, match='wake_up with the tag "weights"'):
        update(engine, "new")
    engine.ask(WakeUp(tags=["weights"]))
    update(engine, "new")
    assert engine.ask(IsSleeping()), "the KV cache is asleep"
    engine.ask(WakeUp())
    assert engine.generate(range(9), greedy()).token_ids == answer("new", range(9))


def test_an_engine_without_weights_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    def lose(method: str, *args: object) -> None:
        raise EngineDeadError("the weights are incomplete")

    monkeypatch.setattr(engine.worker, "call", lose)
    with pytest.raises(EngineDeadError, match="incomplete"):
        update(engine, "new")
    with pytest.raises(EngineDeadError, match="incomplete"):
        engine.add("a", range(9), greedy())
