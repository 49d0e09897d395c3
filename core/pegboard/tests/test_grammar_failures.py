"""What a structured output backend raises, or that it is slow, ends only its request."""

from __future__ import annotations

import gc
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.engine.grammar.request_grammar import RequestGrammar
from pegboard.engine.requests import Request
from pegboard.errors import RequestError
from pegboard.interfaces.structured_output import Constraint
from pegboard_testing.fake_engine import EOS, FakeEngine
from pegboard_testing.fake_structured_output import FakeGrammar, FakeStructuredOutput

VOCAB = 64


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


class Raising(FakeStructuredOutput):
    """Raises in one method, once it has been called as often as `after` says."""

    def __init__(self, method: str, after: int = 2, error: BaseException | None = None) -> None:
        super().__init__(VOCAB, [EOS])
        self.method = method
        self.left = after
        self.error = error or ZeroDivisionError("by nothing")

    def count(self, method: str) -> None:
        self.left -= method == self.method
        if method == self.method and self.left < 0:
            raise self.error

    def reject(self, constraint: Constraint) -> str | None:
        self.count("reject" if constraint.text.endswith(":9") else "")
        return super().reject(constraint)

    def compile(self, constraint: Constraint) -> FakeGrammar:
        self.count("compile" if constraint.text.endswith(":9") else "")
        return RaisingGrammar(super().compile(constraint), self)

    def fill(self, grammars: Any, masks: np.ndarray) -> None:
        if any(grammar.is_hostile for grammar in grammars):
            self.count("fill")
        super().fill([grammar.inner for grammar in grammars], masks)


class RaisingGrammar(FakeGrammar):
    def __init__(self, inner: FakeGrammar, owner: Raising) -> None:
        self.inner = inner
        self.owner = owner
        self.is_hostile = inner._length == 9

    def accept(self, token_ids: Any) -> int:
        self.owner.count("accept" if self.is_hostile else "")
        return self.inner.accept(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self.owner.count("rollback" if self.is_hostile else "")
        self.inner.rollback(num_tokens)

    def fork(self) -> FakeGrammar:
        self.owner.count("fork" if self.is_hostile else "")
        return RaisingGrammar(self.inner.fork(), self.owner)


class PanicException(BaseException):
    """Named as the exception that a panic in Rust code becomes. It is not an Exception."""


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by nothing"), PanicException("index out of bounds"), MemoryError()]
)
@pytest.mark.parametrize("method", ["reject", "compile", "fork", "fill", "accept", "rollback"])
@pytest.mark.parametrize("after", [0, 2])
def test_what_a_backend_raises_ends_only_its_request(
    method: str, after: int, error: BaseException, max_drafts: int
) -> None:
    backend = Raising(method, after, error)
    engine = FakeEngine(structured_output=backend, max_drafts=max_drafts)
    engine.add("other", range(5), structured("3:0,1:7"))
    engine.add("free", range(5), SamplingParams(temperature=0.0, max_tokens=12))
    try:
        engine.add("bad", range(5), structured("3:0,1,2:9"))
    except RequestError as refused:
        assert method == "reject" and "fake" in str(refused)
    results = engine.run()
    if ("bad", 0) in results and results["bad", 0].finish_reason == "error":
        assert "fake" in str(results["bad", 0].deltas[-1].error) and type(error).__name__ in str(
            results["bad", 0].deltas[-1].error
        )
    elif (
        after == 0 and (method != "rollback" or max_drafts) and method not in ("reject", "rollback")
    ):
        pytest.fail("nothing was raised")
    assert results["other", 0].finish_reason == "stop" and len(results["other", 0].token_ids) == 8
    assert len(results["free", 0].token_ids) == 12
    engine.check_idle()


@pytest.mark.parametrize("method", ["compile", "fork", "fill", "accept", "nothing fits"])
def test_a_request_that_failed_is_freed_at_once(method: str) -> None:
    """The error of a constraint is kept for the next request with it. Through its traceback it
    would keep this request, those that ran in the same step, and their grammars."""
    backend = Raising(method, 0)
    backend.error = ZeroDivisionError  # type: ignore[assignment]  # a new error each time
    engine = FakeEngine(structured_output=backend)
    gc.freeze()  # what is there already does not count
    gc.disable()
    logging.disable()  # pytest keeps the records of the log, with their tracebacks
    try:
        for number in range(3):
            engine.add(
                f"bad {number}",
                range(5),
                structured(f"{3 + number}:0,1,2:9" if method != "nothing fits" else "nonsense"),
            )
            engine.add(f"other {number}", range(5), structured("3:0,1:7"))
            results = engine.run()
            assert results[f"bad {number}", 0].finish_reason == "error"
        assert not [item for item in gc.get_objects() if type(item) in (Request, RequestGrammar)]
    finally:
        gc.enable()
        gc.unfreeze()
        logging.disable(logging.NOTSET)


def test_a_backend_that_failed_is_not_asked_again_for_that_constraint() -> None:
    first = Raising("fill", 1)
    second = FakeStructuredOutput(VOCAB, [EOS])
    engine = FakeEngine(structured_output=first)
    engine.engine._grammars.compiler.chain["second"] = second  # type: ignore[index]
    engine.add("a", range(5), structured("3:0,1,2:9"))
    assert engine.run()["a", 0].finish_reason == "error"
    engine.add("b", range(5), structured("3:0,1,2:9"))
    engine.add("c", range(5), structured("3:0,1,2:8"))
    results = engine.run()
    assert results["b", 0].finish_reason == results["c", 0].finish_reason == "stop"
    assert second.num_compiled == 1 and first.num_compiled == 2


class Slow(Raising):
    """A backend whose `method` takes `seconds` on a clock of its own for constraints of length 9.
    The clock stands otherwise."""

    def __init__(
        self, method: str, seconds: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(method)
        self.seconds = seconds
        self.now = 0.0
        self.num_calls = 0
        for clock in ("perf_counter", "thread_time"):
            monkeypatch.setattr(time, clock, lambda: self.now)

    def count(self, method: str) -> None:
        if method == self.method:
            self.num_calls += 1
            self.now += self.seconds(self.num_calls)


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("method", ["fill", "accept"])
@pytest.mark.parametrize(
    "seconds", [lambda call: 3.0 * (call in (4, 5)), lambda call: 0.4], ids=["two", "every"]
)
def test_a_slow_grammar_ends_its_request_only(
    method: str,
    seconds: Callable[[int], float],
    others: int,
    max_drafts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Slow(method, seconds, monkeypatch)
    engine = FakeEngine(structured_output=backend, max_drafts=max_drafts)
    for i in range(others):
        engine.add(f"other {i}", range(5), structured("3:0,1:30", max_tokens=40))
    engine.add("bad", range(5), structured("3:0,1,2:9" if not others else "3:0,1:9", max_tokens=40))
    results = engine.run()
    bad = results["bad", 0]
    assert bad.finish_reason == "error" and re.search(
        r"fake is too slow .* last call took \d", str(bad.deltas[-1].error)
    )
    assert bad.deltas[-1].error_parameter == "structured_outputs"
    assert all(results[f"other {i}", 0].finish_reason == "stop" for i in range(others))
    assert backend.now < 7
    engine.check_idle()


def test_a_grammar_that_waits_for_the_processor_is_not_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Slow("fill", lambda call: 4.0 if call == 2 else 0.2, monkeypatch)
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    engine = FakeEngine(structured_output=backend)
    engine.add("good", range(5), structured("3:0,1,2:9"))
    assert engine.run()["good", 0].finish_reason == "stop"


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_slow_first_mask_is_no_failure(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Slow(method, lambda call: 1.8 if call == 1 else 0.04, monkeypatch)
    engine = FakeEngine(structured_output=backend)
    engine.add("good", range(5), structured("3:0,1,2:9"))
    assert engine.run()["good", 0].finish_reason == "stop"
