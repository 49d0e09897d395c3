"""The Engine with grammars and connectors."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.engine.grammar.grammars import constraint_of
from pegboard.errors import RequestError
from pegboard.interfaces.attention import Full, Window
from pegboard_testing.fake_connectors import FakeKV
from pegboard_testing.fake_engine import EOS, FakeEngine
from pegboard_testing.fake_structured_output import FakeStructuredOutput


def greedy(max_tokens: int | None = 4, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


# --- grammars -------------------------------------------------------------------------------------


def grammar(text: str, max_tokens: int = 20) -> SamplingParams:
    return greedy(
        max_tokens, eos_token_ids=[EOS], structured_outputs=StructuredOutputsParams(grammar=text)
    )


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_output_obeys_its_grammar(max_drafts: int, max_in_flight: int) -> None:
    backend = FakeStructuredOutput(64, [EOS])
    engine = FakeEngine(
        structured_output=backend, max_drafts=max_drafts, max_in_flight=max_in_flight
    )
    engine.add("free", range(9), greedy(12))
    for i in range(3):
        engine.add(str(i), range(i, i + 5), grammar("3:0,1,2:7"))
    results = engine.run()
    for i in range(3):
        *tokens, stop = results[str(i), 0].token_ids
        assert [token % 3 for token in tokens] == [0, 1, 2, 0, 1, 2, 0] and stop == EOS
    assert backend.num_compiled == 1, "equal constraints are compiled once"
    assert results["free", 0].token_ids == FakeEngine().generate(range(9), greedy(12)).token_ids


def test_others_pass_a_request_whose_grammar_compiles() -> None:
    gate = threading.Event()
    engine = FakeEngine(structured_output=FakeStructuredOutput(64, [EOS], gate=gate))
    engine.add("slow", range(5), grammar("3:0,1,2:7"))
    engine.add("quick", range(5), greedy(3))
    while "quick" not in {delta.request_id for delta in engine.step() if delta.finish_reason}:
        pass
    assert engine.engine.has_work and ("slow", 0) not in engine.results
    gate.set()
    assert engine.run()["slow", 0].finish_reason == "stop"


def test_a_grammar_that_does_not_compile_fails_its_request_only() -> None:
    engine = FakeEngine(structured_output=FakeStructuredOutput(64, [EOS]))
    engine.add("bad", range(5), grammar("nonsense"))
    engine.add("good", range(5), greedy(3))
    results = engine.run()
    assert results["bad", 0].finish_reason == "error" and "bad grammar 'nonsense'" in (
        results["bad", 0].deltas[0].error or ""
    )
    assert results["good", 0].finish_reason == "length"
    engine.check_idle()


def test_a_grammar_has_a_time_limit() -> None:
    gate = threading.Event()
    engine = FakeEngine(structured_output=FakeStructuredOutput(64, [EOS], gate=gate, timeout_s=0.0))
    engine.add("slow", range(5), grammar("3:0:7"))
    result = engine.run()["slow", 0]
    gate.set()
    assert result.finish_reason == "error" and "took over 0 s" in (result.deltas[0].error or "")


def test_a_constraint_that_no_backend_enforces_is_refused_with_every_reason() -> None:
    engine = FakeEngine(structured_output=FakeStructuredOutput(64, [EOS]))
    with pytest.raises(RequestError, match="fake: kind 'regex' is not supported"):
        engine.add("a", [3], greedy(structured_outputs=StructuredOutputsParams(regex="a+")))


def test_completions_of_one_request_have_grammars_of_their_own() -> None:
    engine = FakeEngine(structured_output=FakeStructuredOutput(64, [EOS]))
    params = SamplingParams(
        n=3,
        seed=3,
        max_tokens=20,
        eos_token_ids=[EOS],
        structured_outputs=StructuredOutputsParams(grammar="3:0,1,2:7"),
    )
    engine.add("a", range(5), params)
    for (_, _), result in engine.run().items():
        assert [token % 3 for token in result.token_ids[:-1]] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("params", "kind", "text"),
    [
        ({"json": {"type": "object"}}, "json", '{"type": "object"}'),
        ({"json": "{}"}, "json", "{}"),
        ({"choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"structural_tag": "{}", "whitespace_pattern": " "}, "structural_tag", "{}"),
    ],
)
def test_parameters_become_one_constraint(params: dict[str, Any], kind: str, text: str) -> None:
    constraint = constraint_of(StructuredOutputsParams(**params))
    assert (constraint.kind, constraint.text) == (kind, text)
    assert constraint.whitespace_pattern == params.get("whitespace_pattern")


# --- KV connectors --------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["in_step", "between_steps"])
@pytest.mark.parametrize("retains", [[Full()], [Full(), Window(6)]])
def test_a_prefix_travels_from_one_engine_to_another(load: Any, retains: list[Any]) -> None:
    store: dict[Any, Any] = {}
    first = FakeEngine(retains, kv=FakeKV(load, store))
    before = first.generate(range(21), greedy(6))
    assert before.deltas[-1].kv_transfer_params is not None and store
    first.check_idle()
    second = FakeEngine(retains, kv=FakeKV(load, store, hesitate=2))
    after = second.generate(range(21), greedy(6))
    assert after.token_ids == before.token_ids
    if retains == [Full()]:  # the window had dropped the other blocks before they were saved
        assert after.deltas[0].num_cached_tokens == 20 and second.worker.num_tokens == 1 + 5
    second.check_idle()


@pytest.mark.parametrize("load", ["in_step", "between_steps"])
def test_blocks_of_another_model_are_not_loaded(load: Any) -> None:
    store: dict[Any, Any] = {}
    FakeEngine(kv=FakeKV(load, store), identity="a").generate(range(21), greedy(6))
    other = FakeEngine(kv=FakeKV(load, store), identity="b")
    assert other.generate(range(21), greedy(6)).deltas[0].num_cached_tokens == 0
    same = FakeEngine(kv=FakeKV(load, store), identity="a")
    assert same.generate(range(21), greedy(6)).deltas[0].num_cached_tokens == 20


@pytest.mark.parametrize("load", ["in_step", "between_steps"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load(load: Any, policy: Any) -> None:
    store: dict[Any, Any] = {}
    before = FakeEngine(kv=FakeKV(load, store)).generate(range(21), greedy(6))
    engine = FakeEngine(kv=FakeKV(load, store, fails=lambda key: 9), kv_load_failure_policy=policy)
    after = engine.generate(range(21), greedy(6))
    if policy == "recompute":
        num_loaded = 0 if load == "in_step" else 9
        assert (
            after.token_ids == before.token_ids and after.deltas[0].num_cached_tokens == num_loaded
        )
        assert engine.engine.stats()["external_prefix_cache_hits_total"] == num_loaded, (
            "only loaded tokens count as hits"
        )
        again = engine.generate(range(21), greedy(6))
        assert again.token_ids == before.token_ids, "nothing of the failed load was cached"
    else:
        assert after.finish_reason == "error" and "kv_load_failure_policy" in (
            after.deltas[-1].error or ""
        )
        assert engine.engine.stats()["external_prefix_cache_hits_total"] == 0
    engine.check_idle()


def test_a_loading_request_is_passed_and_may_be_aborted() -> None:
    store: dict[Any, Any] = {}
    FakeEngine(kv=FakeKV("between_steps", store)).generate(range(21), greedy(6))
    engine = FakeEngine(kv=FakeKV("between_steps", store))
    engine.add("loading", range(21), greedy(6))
    engine.add("other", range(30, 40), greedy(1))
    engine.step()
    assert [new.request_id for new in engine.executor.batches[0].new] == ["other"]
    engine.engine.abort(["loading"])
    assert engine.engine.stats()["num_free_blocks"] < engine.engine.stats()["num_blocks"] - 1, (
        "the load may still be writing"
    )
    assert engine.run()["loading", 0].finish_reason == "abort"
    engine.check_idle()


@pytest.mark.parametrize("load", ["in_step", "between_steps"])
@pytest.mark.parametrize("bad", [None, 0, 13])
def test_a_window_prefix_travels_without_the_blocks_before_the_window(
    load: Any, bad: int | None
) -> None:
    """If such a load fails, the blocks before the window are missing, so the request must be
    computed from the start."""
    store: dict[Any, Any] = {}
    retains = [Full(), Window(6)]
    first = FakeEngine(retains, kv=FakeKV(load, store)).generate(range(21), greedy(12))
    follow_up = [*range(21), *first.token_ids, 5]
    expected = FakeEngine(retains).generate(follow_up, greedy(6)).token_ids
    engine = FakeEngine(retains, kv=FakeKV(load, store, fails=lambda key: bad))
    result = engine.generate(follow_up, greedy(6))
    assert engine.connector is not None and engine.connector.num_loads == 1
    assert result.deltas[0].num_cached_tokens == (32 if bad is None else 0)
    assert result.token_ids == expected
    engine.check_idle()


def test_no_request_forks_from_a_prompt_whose_load_may_still_fail() -> None:
    store: dict[Any, Any] = {}
    FakeEngine(kv=FakeKV("in_step", store)).generate(range(21), greedy(2))
    params = SamplingParams(n=3, seed=5, max_tokens=6)
    alone = FakeEngine()
    alone.add("a", range(21), params)
    engine = FakeEngine(kv=FakeKV("in_step", store, fails=lambda key: 3), max_in_flight=3)
    engine.add("a", range(21), params)
    expected = alone.run()
    results = engine.run()
    assert [results["a", i].token_ids for i in range(3)] == [
        expected["a", i].token_ids for i in range(3)
    ]
