"""Structured output with xgrammar: byte-level pushdown automata. The part of the masks that does
not depend on the stack is prepared in advance."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.structured_output import Constraint, StructuredOutputSetup
from pegboard_chat.parsing.regex_syntax import without_newlines
from pegboard_structured_output_xgrammar.limits import (
    has_lengths,
    may_be_slow,
    rejection,
    tag_schemas,
)
from pegboard_structured_output_xgrammar.watch import Watch

CALL_S = 2.0
COMPILE_S = 10.0
TRIAL_S = 1.0
"""Seconds that a mask or a token may take, the compilation, and the trial, where the library could
take very long."""

NUM_TRIED = 4
"""The number of tokens of a trial."""

LOOSE_CHARACTERS = r"[^\"\\\r\n]"
"""The character class that the library writes for strings with minLength or maxLength. It allows
control characters."""

JSON_CHARACTERS = r"[^\"\\\0-\x1f]"


class XGrammarState:
    """The matcher of one completion. watch: limits the time of its calls; None if they cannot take
    long. After a call that took too long, the matcher is still in use and is never called again."""

    def __init__(self, matcher: Any, watch: Watch | None) -> None:
        self.matcher = matcher
        self.watch = watch
        self._failure: RequestError | None = None

    def accept(self, token_ids: Sequence[int]) -> int:
        return (
            self._accept(token_ids)
            if self.watch is None
            else int(self._limited(lambda: self._accept(token_ids)))
        )

    def _accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if not self.matcher.accept_token(token):
                return count
        return len(token_ids)

    def mask(self, num_words: int) -> np.ndarray:
        """Return the allowed tokens as int32 [words]. Only for a state with a watch."""
        mask = np.zeros((1, num_words), np.int32)
        self._limited(lambda: self.matcher.fill_next_token_bitmask(mask))
        return mask[0]

    def _limited(self, job: Callable[[], Any]) -> Any:
        assert self.watch is not None
        if self._failure is not None:
            raise self._failure
        try:
            return self.watch.call(job, CALL_S)
        except RequestError as error:
            self._failure = error
            raise

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    def fork(self) -> XGrammarState:
        return XGrammarState(self.matcher.fork(), self.watch)


class XGrammar:
    """Implements `pegboard.interfaces.structured_output.StructuredOutput`. The library is imported
    with the first constraint."""

    def __init__(self, options: None, setup: StructuredOutputSetup) -> None:
        self.setup = setup
        self._lock = threading.Lock()
        self._watch = Watch()

    def reject(self, constraint: Constraint) -> str | None:
        return rejection(constraint)

    def compile(self, constraint: Constraint) -> XGrammarState:
        if not may_be_slow(constraint):
            return self._compile(constraint, None)
        if self._watch.is_full():
            raise RequestError(
                "xgrammar is still busy with others that take too long; try later",
                parameter="structured_outputs",
            )
        state: XGrammarState = self._watch.call(
            lambda: self._compile(constraint, self._watch), COMPILE_S
        )
        self._watch.call(lambda: self._try(state.matcher.fork()), TRIAL_S)
        return state

    def _try(self, matcher: Any) -> None:
        """Accept a few random tokens. Where the library is slow, that often shows at once, and
        another backend can be asked."""
        draws = np.random.default_rng(0)
        mask = np.zeros((1, -(-self.setup.vocab_size // 32)), np.int32)
        for _ in range(NUM_TRIED):
            matcher.fill_next_token_bitmask(mask)
            allowed = np.setdiff1d(
                np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")),
                self.setup.stop_token_ids,
            )
            if not len(allowed):
                return
            matcher.accept_token(int(draws.choice(allowed)))

    def _compile(self, constraint: Constraint, watch: Watch | None) -> XGrammarState:
        import xgrammar

        with self._lock:
            tokens = self._tokens
        # core caches
        compiler = xgrammar.GrammarCompiler(
            tokens, max_threads=self.setup.num_threads, cache_enabled=False
        )
        try:
            matcher = xgrammar.GrammarMatcher(_COMPILE[constraint.kind](compiler, constraint))
            mask = np.zeros((1, -(-self.setup.vocab_size // 32)), np.int32)
            matcher.fill_next_token_bitmask(mask)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            # the library raises these for bad input
            raise RequestError(_message(error), parameter="structured_outputs") from error
        if not mask.any():
            raise RequestError("no text fits the constraint", parameter="structured_outputs")
        return XGrammarState(matcher, watch)

    def fill(self, grammars: Sequence[XGrammarState], masks: np.ndarray) -> None:
        """Raises RequestError if a mask takes too long."""
        bits = masks.view(np.int32)
        quick = [i for i, grammar in enumerate(grammars) if grammar.watch is None]
        if len(quick) == len(grammars):
            self._batch.batch_fill_next_token_bitmask(
                [grammar.matcher for grammar in grammars], bits
            )
            return
        if quick:
            part = np.zeros((len(quick), bits.shape[1]), np.int32)
            self._batch.batch_fill_next_token_bitmask([grammars[i].matcher for i in quick], part)
            bits[quick] = part
        for row, grammar in zip(bits, grammars, strict=True):
            if grammar.watch is not None:
                row[:] = grammar.mask(len(row))

    @cached_property
    def _tokens(self) -> Any:
        import xgrammar

        setup = self.setup
        return xgrammar.TokenizerInfo(
            list(setup.vocabulary.token_bytes),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=setup.vocab_size,
            stop_token_ids=list(setup.stop_token_ids),
        )

    @cached_property
    def _batch(self) -> Any:
        import xgrammar

        return xgrammar.BatchGrammarMatcher(max_threads=self.setup.num_threads)


def _json(compiler: Any, constraint: Constraint) -> Any:
    """Compile a JSON schema. Objects are closed (strict mode), as in vLLM."""
    import xgrammar

    schema = constraint.text if constraint.kind == "json" else '{"type": "object"}'
    any_whitespace = not constraint.disable_any_whitespace
    if not has_lengths(json.loads(schema)):
        return compiler.compile_json_schema(schema, any_whitespace=any_whitespace)
    return _strictly(
        compiler, xgrammar.Grammar.from_json_schema(schema, any_whitespace=any_whitespace)
    )


def _strictly(compiler: Any, grammar: Any) -> Any:
    text = str(grammar)
    if LOOSE_CHARACTERS not in text:
        raise ValueError("minLength and maxLength cannot be enforced with this version of xgrammar")
    return compiler.compile_grammar(text.replace(LOOSE_CHARACTERS, JSON_CHARACTERS))


def _choice(compiler: Any, constraint: Constraint) -> Any:
    texts = [
        json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f")
        for text in json.loads(constraint.text)
    ]
    return compiler.compile_grammar(f"root ::= {' | '.join(texts)}")


def _structural_tag(compiler: Any, constraint: Constraint) -> Any:
    """Compile a structural tag: the library's own form ({"type": "structural_tag", "format": …}),
    or vLLM's older form with structures and triggers."""
    import xgrammar

    tag = json.loads(constraint.text)
    text = _as_format(tag) if "structures" in tag else constraint.text
    if any(map(has_lengths, tag_schemas(tag))):
        return _strictly(compiler, xgrammar.Grammar.from_structural_tag(text))
    return compiler.compile_structural_tag(text)


def _as_format(tag: Mapping[str, Any]) -> str:
    tags = [
        {
            "type": "tag",
            "begin": item["begin"],
            "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
            "end": item["end"],
        }
        for item in tag["structures"]
    ]
    form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    return json.dumps({"type": "structural_tag", "format": form})


_COMPILE: dict[str, Callable[[Any, Constraint], Any]] = {
    "json": _json,
    "json_object": _json,
    "regex": lambda compiler, constraint: compiler.compile_regex(without_newlines(constraint.text)),
    "choice": _choice,
    "grammar": lambda compiler, constraint: compiler.compile_grammar(constraint.text),
    "structural_tag": _structural_tag,
}


def _message(error: Exception) -> str:
    """Returns the message without the time and the source line that the library writes before
    it."""
    text = str(error).strip()
    return text.rpartition(".cc:")[2].partition(": ")[2] or text or type(error).__name__
