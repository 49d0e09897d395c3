"""The parts of structured output in the engine: compilation with fallback and time limits,
reasoning before the output, stop tokens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.config.schema import EngineConfig, StructuredOutputsConfig, structured_outputs_config
from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.engine.grammar import compiler as grammar_compiler
from pegboard.engine.grammar.compiler import GrammarCompiler
from pegboard.engine.grammar.grammars import constraint_of
from pegboard.engine.grammar.request_grammar import ReasoningEnd, RequestGrammar
from pegboard.errors import ConfigError, RequestError
from pegboard.interfaces.structured_output import (
    Constraint,
    StructuredOutputNeed,
    StructuredOutputSetup,
)
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard_testing.fake_engine import EOS, FakeEngine
from pegboard_testing.fake_structured_output import FakeGrammar, FakeStructuredOutput

VOCAB = 64
GOOD = Constraint("grammar", "3:0,1,2:7")


class Refusing(FakeStructuredOutput):
    """Accepts a constraint in its check, and then fails to compile it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(VOCAB, [EOS])
        self._error = error

    def compile(self, constraint: Constraint) -> FakeGrammar:
        self.num_compiled += 1
        raise self._error


def fake(**more: Any) -> FakeStructuredOutput:
    return FakeStructuredOutput(VOCAB, [EOS], **more)


def result_of(compiler: GrammarCompiler, constraint: Constraint) -> Any:
    compilation = compiler.start(constraint)
    while (found := compiler.get(compilation)) is None:
        compiler.wait(1.0)
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- compiling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RequestError("I cannot"), ValueError("unexpected")])
def test_another_backend_is_asked_and_the_reason_is_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = GrammarCompiler({"first": Refusing(error), "second": fake()}, timeout_s=60)
    with caplog.at_level("INFO"):
        assert result_of(compiler, GOOD).name == "second"
    assert "; not first: " in caplog.text and str(error) in caplog.text


def test_failures_are_kept_too_and_tell_every_reason() -> None:
    backend = Refusing(RequestError("I cannot"))
    compiler = GrammarCompiler({"a": backend, "b": backend}, timeout_s=60)
    for _ in range(3):
        with pytest.raises(RequestError, match="a: I cannot; b: I cannot") as caught:
            result_of(compiler, GOOD)
        assert caught.value.parameter == "structured_outputs"
    assert backend.num_compiled == 2, "asked once each"


class Stepwise(FakeStructuredOutput):
    """Compiles one constraint each time that `go` is released, and notes which ones began."""

    def __init__(self) -> None:
        super().__init__(VOCAB, [EOS])
        self.go = threading.Semaphore(0)
        self.begun: list[Constraint] = []

    def compile(self, constraint: Constraint) -> FakeGrammar:
        self.begun.append(constraint)
        assert self.go.acquire(timeout=30)
        return super().compile(constraint)


def of_length(length: int) -> Constraint:
    """A constraint with this many characters."""
    return Constraint("grammar", f"3:{'0,' * (length // 2 - 3)}{'0' * (length % 2)}0:7")


def test_a_thread_that_overruns_is_replaced_and_its_result_used_later() -> None:
    now = [0.0]
    slow = Stepwise()
    compiler = GrammarCompiler({"slow": slow}, timeout_s=10, clock=lambda: now[0])
    first = compiler.start(GOOD)
    wait_until(lambda: first.thread > 0)
    assert compiler.get(first) is None
    now[0] = 51.0  # of which the compilation may have had a fifth
    for _ in range(2):
        with pytest.raises(RequestError, match="took over 10 s"):
            compiler.get(first)
    other = Constraint("grammar", "2:0:4")
    compiler.start(other)
    wait_until(lambda: slow.begun == [GOOD, other])
    slow.go.release(2)
    wait_until(first.future.done)
    assert result_of(compiler, GOOD).name == result_of(compiler, other).name == "slow"
    compiler.stop()


def test_the_time_limit_starts_with_the_compilation() -> None:
    now = [0.0]
    slow = Stepwise()
    compiler = GrammarCompiler({"slow": slow}, timeout_s=10, clock=lambda: now[0])
    first = compiler.start(GOOD)
    second = compiler.start(of_length(20))
    wait_until(lambda: first.thread > 0)
    now[0] = 9.0
    slow.go.release()
    wait_until(lambda: second.thread > 0)
    now[0] = 18.0
    assert compiler.get(first) is not None and compiler.get(second) is None
    slow.go.release()
    assert result_of(compiler, of_length(20)).name == "slow"
    compiler.stop()


def test_the_time_limit_counts_processor_time() -> None:
    class Busy(Stepwise):
        def compile(self, constraint: Constraint) -> FakeGrammar:
            start = time.thread_time()
            while time.thread_time() < start + 0.3:
                pass
            return super().compile(constraint)

    slow = Busy()
    compiler = GrammarCompiler({"slow": slow}, timeout_s=0.2, clock=lambda: 1.0)
    compilation = compiler.start(GOOD)
    wait_until(lambda: bool(slow.begun))
    with pytest.raises(RequestError, match="took over 0.2 s"):
        compiler.get(compilation)
    slow.go.release()
    compiler.stop()


def test_a_long_compilation_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    lowered = []
    monkeypatch.setattr(
        os, "setpriority", lambda which, thread, priority: lowered.append((thread, priority))
    )
    slow = Stepwise()
    compiler = GrammarCompiler({"slow": slow}, timeout_s=30, clock=lambda: now[0])
    first = compiler.start(of_length(20))
    second = compiler.start(of_length(22))
    wait_until(lambda: first.thread > 0)
    now[0] = grammar_compiler.PATIENCE_S - 0.1
    assert compiler.get(second) is None and not lowered and len(slow.begun) == 1
    now[0] = grammar_compiler.PATIENCE_S + 0.1
    assert compiler.get(second) is None and lowered == [(first.thread, 19)] != [
        (threading.get_native_id(), 19)
    ]
    wait_until(lambda: len(slow.begun) == 2)
    slow.go.release(2)
    assert (
        result_of(compiler, first.constraint).name
        == result_of(compiler, second.constraint).name
        == "slow"
    )
    compiler.stop()


def test_stop_ends_idle_threads_at_once_and_does_not_wait_for_a_busy_one() -> None:
    slow = Stepwise()
    compiler = GrammarCompiler({"slow": slow}, timeout_s=10)
    compilation = compiler.start(GOOD)
    wait_until(lambda: bool(slow.begun))
    threads = list(compiler._threads)
    compiler.stop()
    busy = [thread for thread in threads if thread.is_alive()]
    assert len(threads) > 1 and [thread.native_id for thread in busy] == [compilation.thread]
    slow.go.release()
    wait_until(lambda: not busy[0].is_alive())


def test_overdue_threads_are_replaced_without_a_client_and_are_limited() -> None:
    now = [0.0]
    slow = Stepwise()
    compiler = GrammarCompiler({"slow": slow}, timeout_s=10, clock=lambda: now[0])
    for i in range(grammar_compiler.MAX_OVERDUE + 1):
        gone = compiler.start(of_length(20 + i), client=f"{i}")
        wait_until(lambda gone=gone: gone.thread > 0)
        now[0] += 51.0
    last = compiler.start(GOOD)
    with pytest.raises(RequestError, match=r"over 10 s; try later"):
        compiler.get(last)
    slow.go.release(grammar_compiler.MAX_OVERDUE + 2)
    wait_until(last.future.done)  # it recovers when they end
    compiler.stop()


def test_no_client_takes_all_threads() -> None:
    now = [0.0]
    slow = Stepwise()
    compiler = GrammarCompiler({"slow": slow}, timeout_s=30, clock=lambda: now[0])
    greedy = [compiler.start(of_length(20 + i), client="greedy") for i in range(6)]
    for i in range(grammar_compiler.MAX_OVERDUE):
        wait_until(lambda i=i: len(slow.begun) == i + 1)
        now[0] += grammar_compiler.PATIENCE_S + 1
        assert compiler.get(greedy[5]) is None  # overdue threads are replaced
    last = compiler.start(of_length(40), client="other")
    wait_until(lambda: len(slow.begun) == 4)
    assert slow.begun[3] == last.constraint, "the greedy client asked before"
    slow.go.release(10)
    wait_until(lambda: all(entry.future.done() for entry in (*greedy, last)))
    compiler.stop()


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(10, 60)), min_size=1, max_size=12),
    st.lists(st.sampled_from("abc"), max_size=4),
)
def test_the_next_compilation_is_the_fairest(
    waiting: list[tuple[str, int]], running: list[str]
) -> None:
    lane = grammar_compiler._Lane()
    lane.waiting = [
        grammar_compiler.Compilation(of_length(size), client, [lambda: True])
        for client, size in waiting
    ]
    lane.running = [grammar_compiler.Compilation(GOOD, client) for client in running]
    chosen = lane.next()
    able = [
        entry
        for entry in lane.waiting
        if running.count(entry.client) < grammar_compiler.MAX_OVERDUE
    ]
    assert (chosen is None) == (not able)
    for other in able:
        mine = running.count(chosen.client)
        its = running.count(other.client)
        assert (
            mine < its or mine == its and len(chosen.constraint.text) <= len(other.constraint.text)
        )


def test_what_nobody_waits_for_is_not_compiled() -> None:
    slow = Stepwise()
    compiler = GrammarCompiler({"slow": slow}, timeout_s=60)
    first = compiler.start(GOOD)
    wait_until(lambda: first.thread > 0)
    wanted = [True, True, False]
    abandoned = [compiler.start(of_length(20 + i), lambda i=i: wanted[i]) for i in range(3)]
    shared = compiler.start(abandoned[2].constraint, lambda: True)
    wanted[:2] = [False, False]
    slow.go.release(2)
    assert result_of(compiler, shared.constraint).name == "slow"
    assert slow.begun == [GOOD, shared.constraint] and abandoned[0].future.cancelled()
    slow.go.release()
    assert result_of(compiler, abandoned[0].constraint).name == "slow", (
        "and it can be asked for again"
    )
    compiler.stop()


def test_small_constraints_pass_large_ones_and_short_ones_come_first() -> None:
    slow = Stepwise()
    compiler = GrammarCompiler({"slow": slow}, timeout_s=60)
    large = [of_length(grammar_compiler.SMALL + 1000 - i) for i in range(3)]
    started = [compiler.start(large[0])]
    wait_until(lambda: slow.begun == large[:1])
    started += [compiler.start(constraint) for constraint in large[1:]]
    compiler.start(GOOD)
    wait_until(lambda: slow.begun == [large[0], GOOD])
    slow.go.release(4)
    wait_until(lambda: all(compilation.future.done() for compilation in started))
    assert slow.begun == [large[0], GOOD, large[2], large[1]]
    compiler.stop()


def test_a_request_that_leaves_is_not_compiled() -> None:
    backend = Stepwise()
    engine = FakeEngine(structured_output=backend)
    for i in range(5):
        engine.add(f"{i}", range(5), structured(f"3:0:{i + 1}"))
    wait_until(lambda: len(backend.begun) == 1)
    engine.engine.abort([f"{i}" for i in range(4)])
    backend.go.release(2)
    assert engine.run()["4", 0].finish_reason == "stop" and len(backend.begun) == 2


def test_old_constraints_fall_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED", 2)
    backend = fake()
    compiler = GrammarCompiler({"a": backend}, timeout_s=60)
    constraints = [Constraint("grammar", f"3:{i}:2") for i in range(3)]
    for constraint in [*constraints, constraints[0]]:
        result_of(compiler, constraint)
    assert backend.num_compiled == 4
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_CHARACTERS", 30)
    for constraint in [of_length(40), constraints[0]]:
        result_of(compiler, constraint)
    assert list(compiler._cache) == [constraints[0]]
    compiler.stop()


# --- which constraint -----------------------------------------------------------------------------


def test_configured_options_hold_for_every_request() -> None:
    config = StructuredOutputsConfig(
        disable_any_whitespace=True, disable_additional_properties=True
    )
    constraint = constraint_of(StructuredOutputsParams(json_object=True), config)
    assert constraint.disable_any_whitespace and constraint.disable_additional_properties
    assert not constraint_of(StructuredOutputsParams(json_object=True)).disable_any_whitespace


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"backend": ["auto", "xgrammar"]}, "backend must be 'auto'"),
        ({"backend": []}, "backend must be 'auto'"),
        ({"backend": 3}, "structured_outputs_config"),
        ({"back_end": "auto"}, "did you mean 'backend'"),
        ({"disable_any_whitespace": "yes"}, "disable_any_whitespace"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        structured_outputs_config(EngineConfig(structured_outputs_config=values))


def test_names_of_backends() -> None:
    def names(value: Any) -> list[str]:
        return structured_outputs_config(
            EngineConfig(structured_outputs_config={"backend": value})
        ).names

    assert names("auto") == [] and names("a") == ["a"] and names(["b", "a"]) == ["b", "a"]


def test_the_setup_pads_the_vocabulary_and_joins_the_ends() -> None:
    vocabulary = Vocabulary([b"a", b"b", b""], frozenset({2}), (2,))
    setup = StructuredOutputSetup(5, lambda: vocabulary, (1,))
    assert list(setup.vocabulary.token_bytes) == [b"a", b"b", b"", b"", b""]
    assert setup.vocabulary.special_token_ids == {2, 3, 4} and setup.stop_token_ids == (1, 2)
    assert list(StructuredOutputSetup(2, lambda: vocabulary).vocabulary.token_bytes) == [b"a", b"b"]
    assert StructuredOutputNeed(constraint="json").wants() == {"constraint": "json"}


# --- one completion -------------------------------------------------------------------------------


def grammar_of(length: int, reasoning: ReasoningEnd | None = None) -> RequestGrammar:
    """Allows `length` tokens that are 0 modulo 3, then EOS."""
    backend = fake()
    inner = backend.compile(Constraint("grammar", f"3:0:{length}"))
    return RequestGrammar(
        "fake", backend, inner, vocab_size=VOCAB, stop_token_ids=[EOS], reasoning=reasoning
    )


def allowed(grammar: RequestGrammar) -> set[int]:
    mask = np.zeros(2, np.uint32)
    grammar.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_stop_tokens_only_where_the_text_may_end_and_then_nothing_else() -> None:
    grammar = grammar_of(2)
    assert grammar.accept([EOS]) == 0 and grammar.accept([3, EOS]) == 1 and not grammar.has_ended()
    assert grammar.accept([6]) == 1 and grammar.has_ended() and allowed(grammar) == {EOS}
    assert grammar.accept([EOS, EOS, 3]) == 2 and allowed(grammar) == {EOS} and grammar.has_ended()
    grammar.rollback(3)
    assert allowed(grammar) == set(range(0, VOCAB, 3)) - {EOS}


@given(st.lists(st.integers(2, 40), max_size=12), st.integers(0, 6), st.data())
def test_rollback_across_the_end_of_reasoning(
    thoughts: list[int], num_inside: int, data: st.DataObject
) -> None:
    end = [50, 51]
    tokens = [*thoughts, *end, *[3] * num_inside, *([EOS, EOS] if num_inside == 6 else [])]
    grammar = grammar_of(6, ReasoningEnd([end], ()))
    seen = [allowed(grammar)]
    for token in tokens:
        assert grammar.accept([token]) == 1
        seen.append(allowed(grammar))
    assert all(mask == set(range(VOCAB)) for mask in seen[: len(thoughts) + 2])
    assert seen[len(thoughts) + 2] == set(range(0, VOCAB, 3)) - {EOS}
    back = data.draw(st.integers(0, len(tokens)))
    grammar.rollback(back)
    assert allowed(grammar) == seen[len(tokens) - back]
    assert grammar.accept(tokens[len(tokens) - back :]) == back and allowed(grammar) == seen[-1]


@pytest.mark.parametrize(
    ("pieces", "is_found"),
    [
        ([b"x", b"</", b"think", b">"], True),
        ([b"<", b"/think", b">\n"], True),
        ([b"</think>"], True),
        ([b"a</thi", b"nk>b"], True),
        ([b"</think"], False),
        ([b"< /think>"], False),
    ],
)
def test_the_end_is_found_however_it_is_spelled(pieces: list[bytes], is_found: bool) -> None:
    token_bytes = [b"</", b"think", b">", *pieces]
    reasoning = ReasoningEnd([[0, 1, 2]], token_bytes)
    tokens = list(range(3, 3 + len(pieces)))
    found = [reasoning.ends_reasoning(tokens[:n]) for n in range(1, len(tokens) + 1)]
    assert found == [False] * (len(tokens) - 1) + [is_found]


def test_special_tokens_are_found_by_id_and_any_end_will_do() -> None:
    reasoning = ReasoningEnd([[7], [5, 6], []], [b"a"] * 5 + [b"", b"x", b""])
    assert reasoning.ends_reasoning([1, 7]) and reasoning.ends_reasoning([5, 6])
    assert (
        not reasoning.ends_reasoning([5])
        and not reasoning.ends_reasoning([6])
        and not reasoning.ends_reasoning([99])
    )


# --- in the engine --------------------------------------------------------------------------------


def structured(text: str, **more: Any) -> SamplingParams:
    structure = StructuredOutputsParams(grammar=text, **more.pop("structure", {}))
    return SamplingParams(
        **{
            "temperature": 0.0,
            "max_tokens": 20,
            "eos_token_ids": [EOS],
            **more,
            "structured_outputs": structure,
        }
    )


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_grammar_begins_after_the_reasoning(max_drafts: int, max_in_flight: int) -> None:
    free = FakeEngine().generate(range(9), SamplingParams(temperature=0.0, max_tokens=12)).token_ids
    end = free[4:6]
    first = next(i for i in range(2, 7) if free[i - 2 : i] == end)
    engine = FakeEngine(
        structured_output=fake(), max_drafts=max_drafts, max_in_flight=max_in_flight
    )
    engine.add("a", range(9), structured("3:0,1,2:4", structure={"reasoning_end_token_ids": [end]}))
    tokens = engine.run()["a", 0].token_ids
    assert tokens[:first] == free[:first]
    assert [token % 3 for token in tokens[first:-1]] == [0, 1, 2, 0] and tokens[-1] == EOS


@pytest.mark.parametrize(
    ("more", "num_tokens", "finish"),
    [
        ({"min_tokens": 15}, 4, "stop"),
        ({"min_tokens": 5}, 4, "stop"),
        ({"min_tokens": 4}, 5, "stop"),
        ({"ignore_eos": True}, 20, "length"),
        ({"eos_token_ids": []}, 4, "stop"),
        ({}, 5, "stop"),
    ],
)
def test_how_a_finished_text_ends(more: dict[str, Any], num_tokens: int, finish: str) -> None:
    engine = FakeEngine(
        structured_output=FakeStructuredOutput(VOCAB, more.get("eos_token_ids", [EOS]))
    )
    engine.add("a", range(5), structured("3:0:4", **more))
    result = engine.run()["a", 0]
    assert (len(result.token_ids), result.finish_reason) == (num_tokens, finish)
    assert [token % 3 for token in result.token_ids[:4]] == [0] * 4 and set(
        result.token_ids[4:]
    ) <= {EOS}
    assert result.deltas[-1].ends_whole == (num_tokens == 4)


def test_the_field_at_fault_travels_with_the_failure() -> None:
    engine = FakeEngine(structured_output=fake())
    engine.add("a", range(5), structured("nonsense", n=1))
    assert engine.run()["a", 0].deltas[-1].error_parameter == "structured_outputs"
    params = structured("nonsense", n=1)
    params.structured_outputs.parameter = "response_format"
    engine.add("b", range(5), params)
    assert engine.run()["b", 0].deltas[-1].error_parameter == "response_format", (
        "and it is that request's own"
    )


def test_all_completions_of_a_bad_request_fail_after_one_compilation() -> None:
    backend = Refusing(RequestError("no"))
    engine = FakeEngine(structured_output=backend)
    engine.add("a", range(5), structured("x", n=3, temperature=1.0, seed=1))
    assert [result.finish_reason for result in engine.run().values()] == ["error"] * 3
    assert backend.num_compiled == 1
    engine.check_idle()
