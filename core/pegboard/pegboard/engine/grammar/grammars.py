"""Structured output in the engine: the grammar of a request once it is compiled, token masks per step, drafts trimmed.

A constraint is compiled once, in a thread with a time limit (`compiler.py`); every request with the same
constraint gets a fork of the result. The scheduler skips a request whose grammar is not compiled yet. A failed
compilation fails that request only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pegboard.config.schema import StructuredOutputsConfig
from pegboard.data.batch import Array, Batch, TokenMasks
from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.engine.grammar.compiler import GrammarCompiler
from pegboard.engine.grammar.request_grammar import ReasoningEnd, RequestGrammar
from pegboard.engine.requests import Request
from pegboard.errors import RequestError, blame
from pegboard.interfaces.structured_output import Constraint, StructuredOutput

CONSTRAINT_KINDS: tuple[Any, ...] = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def constraint_of(params: StructuredOutputsParams, config: StructuredOutputsConfig | None = None) -> Constraint:
    """The one constraint of the parameters as text, with the options for whitespace and properties."""
    config = config or StructuredOutputsConfig()
    kind = next(kind for kind in CONSTRAINT_KINDS if getattr(params, kind) is not None)  # the parameters have exactly one
    value = getattr(params, kind)
    if not isinstance(value, str):
        value = "" if kind == "json_object" else json.dumps(value)
    return Constraint(
        kind,
        value,
        params.disable_any_whitespace or config.disable_any_whitespace,
        params.disable_additional_properties or config.disable_additional_properties,
        params.whitespace_pattern,
    )


class Grammars:
    """All grammars of one engine. chain: backends by name, asked in order. token_bytes: what tokens stand for, to find the end of
    reasoning; asked for when a request has one, after a constraint has been compiled."""

    def __init__(
        self,
        chain: Mapping[str, StructuredOutput],
        *,
        vocab_size: int,
        config: StructuredOutputsConfig | None = None,
        token_bytes: Callable[[], Sequence[bytes]] = tuple,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chain = chain
        self._vocab_size = vocab_size
        self._config = config or StructuredOutputsConfig()
        self._token_bytes = token_bytes
        self._compiler = GrammarCompiler(chain, timeout_s=timeout_s, clock=clock)

    def check(self, params: StructuredOutputsParams) -> None:
        """RequestError, with every backend's reason, when none can enforce the constraint."""
        with _blaming(params):
            self._compiler.check(constraint_of(params, self._config))

    def start(self, request: Request) -> None:
        """Compile the constraint of the request, unless that is done or under way. The request waits for it."""
        self._compiler.start(constraint_of(_wanted(request), self._config))
        request.waits_for.add("grammar")

    def take(self, request: Request) -> bool:
        """Give the request its grammar if it is ready. PegboardError (the request's own) when compilation failed or took too
        long."""
        params = _wanted(request)
        with _blaming(params):
            compiled = self._compiler.get(constraint_of(params, self._config))
        if compiled is None:
            return False
        with blame(compiled.name):
            grammar = compiled.grammar.fork()
        reasoning = None
        if params.reasoning_end_token_ids and not self._config.enable_in_reasoning:
            reasoning = ReasoningEnd(params.reasoning_end_token_ids, self._token_bytes())
        assert isinstance(request.params, SamplingParams)
        request.grammar = RequestGrammar(
            compiled.name,
            compiled.backend,
            grammar,
            vocab_size=self._vocab_size,
            stop_token_ids=request.params.eos_token_ids,
            reasoning=reasoning,
        )
        request.waits_for.discard("grammar")
        return True

    def wait(self, timeout_s: float) -> None:
        """Sleep until a compilation ends. Called when the engine has nothing else to do."""
        self._compiler.wait(timeout_s)

    def trim(self, request: Request, draft_token_ids: list[int]) -> list[int]:
        """The drafts up to the first one the grammar forbids."""
        num_valid = request.grammar.accept(draft_token_ids)
        request.grammar.rollback(num_valid)
        return draft_token_ids[:num_valid]

    def masks(self, batch: Batch, requests: Sequence[Request | None], drafts: Mapping[int, Sequence[int]]) -> TokenMasks:
        """Masks for every logits row of `batch` whose request has a grammar.

        requests: per row of the batch, None where the request ended meanwhile. drafts: row → draft tokens of this step. Older
        steps are accepted already, so each grammar stands at its row's first sampled position.
        """
        users: list[tuple[int, RequestGrammar]] = []
        for row, request, wanted in zip(batch.rows.tolist(), requests, batch.samples.tolist(), strict=True):
            grammar = None if request is None else request.grammar
            if wanted and grammar is not None and (grammar.is_active or row in drafts):
                users.append((row, grammar))
        depths = np.array([1 + len(drafts.get(row, ())) for row, _ in users], np.int32)
        starts = np.cumsum(depths) - depths
        bits = np.zeros((int(depths.sum()), -(-self._vocab_size // 32)), np.uint32)
        self._fill_first([grammar for _, grammar in users], bits, starts)
        for (row, grammar), start, depth in zip(users, starts.tolist(), depths.tolist(), strict=True):
            if depth > 1:
                self._fill_depths(grammar, drafts[row], bits[start + 1 : start + depth])
        return TokenMasks(
            rows=np.repeat(np.array([row for row, _ in users], np.int32), depths),
            depths=(np.arange(len(bits)) - np.repeat(starts, depths)).astype(np.int32),
            bits=bits,
        )

    def stop(self) -> None:
        """Stop compiling."""
        self._compiler.stop()

    def _fill_first(self, grammars: Sequence[RequestGrammar], bits: Array, starts: Array) -> None:
        """The first position of every row, one call per backend (usually one), so that it can use threads."""
        by_backend: dict[str, list[int]] = {}
        for i, grammar in enumerate(grammars):
            if grammar.fills_from_backend:
                by_backend.setdefault(grammar.name, []).append(i)
            else:
                grammar.fill(bits[starts[i]])
        for name, chosen in by_backend.items():
            inner = [grammars[i].grammar for i in chosen]
            with blame(name):
                if len(chosen) == len(bits):  # no drafts, one backend: no copy
                    self._chain[name].fill(inner, bits)
                    continue
                part = np.zeros((len(chosen), bits.shape[1]), np.uint32)
                self._chain[name].fill(inner, part)
            bits[starts[chosen]] = part

    def _fill_depths(self, grammar: RequestGrammar, drafts: Sequence[int], bits: Array) -> None:
        """Positions after accepted drafts, one after the other: each needs the state that its drafts lead to."""
        num_accepted = 0
        for depth, token in enumerate(drafts):
            if grammar.accept([token]) != 1:
                break  # cannot happen after trim(); the mask stays empty
            num_accepted += 1
            grammar.fill(bits[depth])
        grammar.rollback(num_accepted)


@contextmanager
def _blaming(params: StructuredOutputsParams) -> Iterator[None]:
    """Constraints are shared; an error about one names the field of the request that gets it."""
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error), parameter=params.parameter) from error


def _wanted(request: Request) -> StructuredOutputsParams:
    assert isinstance(request.params, SamplingParams) and request.params.structured_outputs, "only constrained requests come here"
    return request.params.structured_outputs
