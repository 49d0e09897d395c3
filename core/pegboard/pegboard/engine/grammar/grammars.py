"""Structured output in the engine: it gives requests their compiled grammars, fills the token masks
of each step, and trims drafts.

A constraint is compiled once, in a thread with a time limit (`compiler.py`). Every request with the
same constraint gets a fork of the result. The scheduler skips a request whose grammar is not
compiled yet. A failed compilation fails only that request, and so does an error that a backend
raises while it enforces a grammar.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from pegboard.config.schema import StructuredOutputsConfig
from pegboard.data.batch import Array, Batch, TokenMasks
from pegboard.data.request import RequestDelta
from pegboard.data.sampling_params import CONSTRAINT_KINDS, StructuredOutputsParams
from pegboard.engine.gates import Gate
from pegboard.engine.grammar.compiler import Compilation, Compiled, GrammarCompiler
from pegboard.engine.grammar.request_grammar import CALL_S, ReasoningEnd, RequestGrammar
from pegboard.engine.requests import Request
from pegboard.errors import PegboardError, PluginFailure, RequestError, bare
from pegboard.interfaces.structured_output import Constraint
from pegboard.plugins.names import to_install

NAP_S = 0.01
"""The longest time, in seconds, that a step sleeps while every request waits for its grammar to be
compiled."""

NO_TOKEN_LEFT = "logit_bias, allowed_token_ids or bad_words leave none of the tokens that it allows"

ROW_S = 0.01
"""Seconds per row that a call which fills many masks may take in addition to `CALL_S` before it
counts as slow."""


def constraint_of(
    params: StructuredOutputsParams, config: StructuredOutputsConfig | None = None
) -> Constraint:
    """Return the constraint of the parameters as text, with the options for whitespace and
    properties."""
    config = config or StructuredOutputsConfig()
    # exactly one is set
    kind = next(kind for kind in CONSTRAINT_KINDS if getattr(params, kind) is not None)
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


class Grammars(Gate):
    """All grammars of one engine. compiler: has the backends; the engine stops it. token_bytes:
    returns the bytes of each token, which are needed to find the end of reasoning. It is called for
    a request that has reasoning, after its constraint was compiled. absence: why there is no
    backend; "" = none is active."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        vocab_size: int,
        config: StructuredOutputsConfig | None = None,
        token_bytes: Callable[[], Sequence[bytes]] = tuple,
        absence: str = "",
    ) -> None:
        self.compiler = compiler
        self._vocab_size = vocab_size
        self._config = config or StructuredOutputsConfig()
        self._token_bytes = token_bytes
        self._absence = absence
        self._compilations: dict[Request, Compilation] = {}  # of requests that wait for them
        self._slow: set[str] = set()  # the backends whose last fill was slow

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise RequestError, with every backend's reason, if no backend can enforce the
        constraint."""
        if not self.compiler.chain:
            absence = self._absence or (
                "needs a structured output plugin, and none is active; "
                + to_install("structured_output")
            )
            raise RequestError(f"{params.parameter} {absence}", parameter=params.parameter)
        with _blaming(params):
            self.compiler.check(constraint_of(params, self._config))

    def start(self, request: Request) -> None:
        """Start to compile the constraint of the request, unless that is done or under way. The
        request waits for the result."""
        constraint = constraint_of(_wanted(request), self._config)
        self._compilations[request] = self.compiler.start(
            constraint, lambda: not request.is_finished, request.client
        )

    def ready(self, request: Request) -> bool:
        """Give the request its grammar, if that is compiled. Raises PegboardError if the
        compilation failed or took too long."""
        compilation = self._compilations.get(request)
        if compilation is None:
            return True
        params = _wanted(request)
        with _blaming(params):
            compiled: Compiled | None = self.compiler.get(compilation)
        if compiled is None:
            return False
        with self.compiler.blame(compiled.name):
            grammar = compiled.grammar.fork()
        reasoning = None
        if params.reasoning_end_token_ids and not self._config.enable_in_reasoning:
            reasoning = ReasoningEnd(params.reasoning_end_token_ids, self._token_bytes())
        request.grammar = RequestGrammar(
            compiled.name,
            compiled.backend,
            grammar,
            on_failure=partial(self.compiler.distrust, compilation.constraint, compiled.name),
            vocab_size=self._vocab_size,
            stop_token_ids=request.params.eos_token_ids,
            reasoning=reasoning,
            blaming=self.compiler.blame,
        )
        del self._compilations[request]
        return True

    def ended(self, request: Request) -> None:
        self._compilations.pop(request, None)

    def rest(self) -> None:
        self.compiler.wait(NAP_S)

    def advance(
        self, request: Request, token_ids: list[int], delta: RequestDelta, reason: str | None
    ) -> str | None:
        """Advance the grammar and return the finish reason. The completion also ends if the grammar
        allows only a stop token but no stop token can be sampled, because of min_tokens or because
        the model has none."""
        params = request.params
        if request.grammar.accept(token_ids) != len(token_ids):
            failure = request.grammar.error
            delta.error = str(
                failure
                or f"token ids {token_ids} do not fit the request's grammar; {NO_TOKEN_LEFT}"
            )
            if not isinstance(failure, PluginFailure):
                delta.error_parameter = _wanted(request).parameter
            return "error"
        if reason is not None:
            return reason
        may_stop = params.eos_token_ids and (
            params.ignore_eos or len(request.output_token_ids) >= params.min_tokens
        )
        if may_stop or not request.grammar.has_ended():
            return None
        delta.ends_whole = True
        return "stop"

    def trim(self, request: Request, draft_token_ids: list[int]) -> list[int]:
        """Return the drafts before the first one that the grammar forbids."""
        num_valid = request.grammar.accept(draft_token_ids)
        request.grammar.rollback(num_valid)
        return draft_token_ids[:num_valid]

    def masks(
        self, batch: Batch, requests: Sequence[Request | None], drafts: Mapping[int, Sequence[int]]
    ) -> TokenMasks:
        """Return masks for every logits row of `batch` whose request has a grammar. requests: one
        per row of the batch, None if the request has ended meanwhile. drafts: row → draft tokens of
        this step. The grammars have already accepted the tokens of all earlier steps, so each
        grammar is at its row's first sampled position.
        """
        users: list[tuple[int, RequestGrammar]] = []
        for row, request, wanted in zip(
            batch.rows.tolist(), requests, batch.samples.tolist(), strict=True
        ):
            grammar = None if request is None else request.grammar
            if wanted and grammar is not None and (grammar.is_active or row in drafts):
                users.append((row, grammar))
        depths = np.array([1 + len(drafts.get(row, ())) for row, _ in users], np.int32)
        starts = np.cumsum(depths) - depths
        bits = np.zeros((int(depths.sum()), -(-self._vocab_size // 32)), np.uint32)
        self._fill_first([grammar for _, grammar in users], bits, starts)
        for (row, grammar), start, depth in zip(
            users, starts.tolist(), depths.tolist(), strict=True
        ):
            if depth > 1:
                self._fill_depths(grammar, drafts[row], bits[start + 1 : start + depth])
        return TokenMasks(
            rows=np.repeat(np.array([row for row, _ in users], np.int32), depths),
            depths=(np.arange(len(bits)) - np.repeat(starts, depths)).astype(np.int32),
            bits=bits,
        )

    def _fill_first(self, grammars: Sequence[RequestGrammar], bits: Array, starts: Array) -> None:
        """Fill the mask of the first position of every row. There is one call per backend, so that
        the backend can use threads. Usually there is one backend. After a slow call, its rows are
        filled one at a time, to find out which one is slow."""
        by_backend: dict[str, list[int]] = {}
        for i, grammar in enumerate(grammars):
            if grammar.fills_from_backend:
                by_backend.setdefault(grammar.name, []).append(i)
            else:
                grammar.fill(bits[starts[i]])
        for name, chosen in by_backend.items():
            inner = [grammars[i].grammar for i in chosen]
            is_whole = len(chosen) == len(bits)  # no drafts, one backend: no copy
            part = bits if is_whole else np.zeros((len(chosen), bits.shape[1]), np.uint32)
            started = time.perf_counter()
            is_filled = False
            if len(chosen) > 1 and name not in self._slow:
                try:
                    with self.compiler.blame(name):
                        self.compiler.chain[name].fill(inner, part)
                    is_filled = True
                except PegboardError:
                    # filled one at a time below, so that only the rows that fail are affected
                    part[:] = 0
            if not is_filled:
                for i, row in zip(chosen, part, strict=True):
                    grammars[i].fill(row)
            is_slow = time.perf_counter() - started > CALL_S + ROW_S * len(chosen)
            (self._slow.add if is_slow else self._slow.discard)(name)
            if not is_whole:
                bits[starts[chosen]] = part

    def _fill_depths(self, grammar: RequestGrammar, drafts: Sequence[int], bits: Array) -> None:
        """Fill the masks of the positions after drafts, one at a time, because each needs the state
        after the drafts before it."""
        num_accepted = 0
        for depth, token in enumerate(drafts):
            if grammar.accept([token]) != 1:
                # drafts were trimmed, so this happens only if the backend failed
                bits[depth:] = np.iinfo(np.uint32).max
                break
            num_accepted += 1
            grammar.fill(bits[depth])
        grammar.rollback(num_accepted)


@contextmanager
def _blaming(params: StructuredOutputsParams) -> Iterator[None]:
    """Make the error name the field of this request. Requests share constraints, so the error may
    come from another request, and is kept for the next one."""
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error), parameter=params.parameter) from bare(error)


def _wanted(request: Request) -> StructuredOutputsParams:
    assert request.params.structured_outputs, "the request is constrained"
    return request.params.structured_outputs
