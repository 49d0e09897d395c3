"""Structured output in the engine: compile off the loop, fill token masks per step, trim drafts.

A constraint is compiled once, in a thread with a time limit, by the first backend of the chain that can enforce it; every
request with the same constraint gets a fork of the result. A request whose grammar is not there yet is passed over by the
scheduler. A failed compilation fails that request only.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegboard.batch import Array, Batch, TokenMasks
from pegboard.errors import PegboardError, RequestError, blame
from pegboard.interfaces.structured_output import Constraint, Grammar, StructuredOutput
from pegboard.request import Request
from pegboard.sampling_params import SamplingParams, StructuredOutputsParams

MAX_CACHED = 256
"""Compiled constraints kept, least recently used ones go."""


def constraint_of(params: StructuredOutputsParams) -> Constraint:
    """The one constraint the parameters give, as text; whitespace and property options ride along."""
    options: dict[str, Any] = {
        "disable_any_whitespace": params.disable_any_whitespace,
        "disable_additional_properties": params.disable_additional_properties,
        "whitespace_pattern": params.whitespace_pattern,
    }
    if params.json is not None:
        text = params.json if isinstance(params.json, str) else json.dumps(params.json)
        return Constraint("json", text, **options)
    if params.choice is not None:
        return Constraint("choice", json.dumps(params.choice), **options)
    if params.json_object is not None:
        return Constraint("json_object", "", **options)
    for kind in ("regex", "grammar", "structural_tag"):
        if (text := getattr(params, kind)) is not None:
            return Constraint(kind, text, **options)
    raise AssertionError("StructuredOutputsParams checks that one is given")


def constraint_for(request: Request) -> Constraint | None:
    """What this request's output must obey."""
    params = request.params
    wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
    return None if wanted is None else constraint_of(wanted)


@dataclass(slots=True)
class _Compilation:
    """A constraint on its way: who compiles it, the future of its grammar, and when it must be done."""

    name: str
    future: Future[Grammar]
    deadline_s: float


@dataclass(slots=True)
class RequestGrammar:
    """The grammar of one completion and the backend (by name) that fills its masks; kept in `Request.grammar`."""

    name: str
    backend: StructuredOutput
    grammar: Grammar

    def accept(self, token_ids: Sequence[int]) -> int:
        with blame(self.name):
            return self.grammar.accept(token_ids)

    def rollback(self, num_tokens: int) -> None:
        with blame(self.name):
            self.grammar.rollback(num_tokens)


class Grammars:
    """All grammars of one engine. `chain`: backends by name, asked in order."""

    def __init__(
        self,
        chain: Mapping[str, StructuredOutput],
        *,
        vocab_size: int,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        num_threads: int = 2,
    ) -> None:
        self._chain = chain
        self._num_words = -(-vocab_size // 32)
        self._timeout_s = timeout_s
        self._clock = clock
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._cache: OrderedDict[Constraint, _Compilation] = OrderedDict()

    def check(self, constraint: Constraint) -> None:
        """RequestError, with every backend's reason, when nobody enforces the constraint."""
        self._choose(constraint)

    def start(self, request: Request) -> None:
        """Compile the request's constraint unless that is done or under way. The request waits for it."""
        constraint = constraint_for(request)
        assert constraint is not None
        if constraint not in self._cache:
            name = self._choose(constraint)
            future = self._threads.submit(self._chain[name].compile, constraint)
            self._cache[constraint] = _Compilation(name, future, self._clock() + self._timeout_s)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(constraint)
        request.waits_for.add("grammar")

    def take(self, request: Request) -> bool:
        """Give the request its grammar if it is ready. PegboardError (the request's own) when compilation failed or took too
        long."""
        constraint = constraint_for(request)
        assert constraint is not None
        compilation = self._cache.get(constraint)
        if compilation is None:  # it failed for another request, or fell out of the cache: try again
            self.start(request)
            return False
        if not compilation.future.done():
            if self._clock() <= compilation.deadline_s:
                return False
            del self._cache[constraint]
            raise RequestError(
                f"compiling the {constraint.kind} constraint took over {self._timeout_s:g} s; simplify it",
                parameter="structured_outputs",
            )
        try:
            with blame(compilation.name):
                grammar = compilation.future.result().fork()
        except PegboardError:
            del self._cache[constraint]
            raise
        request.grammar = RequestGrammar(compilation.name, self._chain[compilation.name], grammar)
        request.waits_for.discard("grammar")
        return True

    def wait(self, timeout_s: float) -> None:
        """Sleep until some compilation ends: called when the engine has nothing else to do."""
        pending = [entry.future for entry in self._cache.values() if not entry.future.done()]
        if pending:
            wait(pending, timeout_s, FIRST_COMPLETED)

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
        for row, request, wanted in zip(batch.rows.tolist(), requests, batch.samples, strict=True):
            if wanted and request is not None and request.grammar is not None:
                users.append((row, request.grammar))
        depths = [1 + len(drafts.get(row, ())) for row, _ in users]
        starts = np.concatenate([[0], np.cumsum(depths)]).astype(np.int64)
        bits = np.zeros((int(starts[-1]), self._num_words), np.uint32)
        self._fill_first([grammar for _, grammar in users], bits, starts[:-1])
        for (row, grammar), start, depth in zip(users, starts, depths, strict=False):
            if depth > 1:
                self._fill_depths(grammar, drafts[row], bits[start + 1 : start + depth])
        return TokenMasks(
            rows=np.repeat(np.array([row for row, _ in users], np.int32), depths),
            depths=np.array([d for depth in depths for d in range(depth)], np.int32),
            bits=bits,
        )

    def stop(self) -> None:
        """Forget what still compiles."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _choose(self, constraint: Constraint) -> str:
        reasons = []
        for name, backend in self._chain.items():
            with blame(name):
                reason = backend.reject(constraint)
            if reason is None:
                return name
            reasons.append(f"{name}: {reason}")
        why = "; ".join(reasons) or "no structured output plugin is active"
        raise RequestError(f"the {constraint.kind} constraint cannot be enforced ({why})", parameter="structured_outputs")

    def _fill_first(self, grammars: Sequence[RequestGrammar], bits: Array, starts: Array) -> None:
        """The first position of every row, one call per backend (usually one), so that it can use threads."""
        for name, backend in self._chain.items():
            chosen = [i for i, grammar in enumerate(grammars) if grammar.name == name]
            if chosen:
                part = np.zeros((len(chosen), self._num_words), np.uint32)
                with blame(name):
                    backend.fill([grammars[i].grammar for i in chosen], part)
                bits[starts[chosen]] = part

    def _fill_depths(self, grammar: RequestGrammar, drafts: Sequence[int], bits: Array) -> None:
        """Positions behind accepted drafts, one after the other: each needs the state its drafts lead to."""
        num_accepted = 0
        for depth, token in enumerate(drafts):
            if grammar.accept([token]) != 1:
                break  # cannot happen after trim(); an empty mask would be the honest answer
            num_accepted += 1
            with blame(grammar.name):
                grammar.backend.fill([grammar.grammar], bits[depth : depth + 1])
        grammar.rollback(num_accepted)
