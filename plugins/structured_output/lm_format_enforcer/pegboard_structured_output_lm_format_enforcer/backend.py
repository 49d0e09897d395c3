"""Structured output with lm-format-enforcer: its character-level parsers are run over the tree of
the vocabulary's tokens. The library's own token loop is not used, because it keeps every prefix it
has seen and cannot undo. Tokens that are not whole characters are never allowed, because the
parsers work on characters, not bytes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.structured_output import Constraint, StructuredOutputSetup
from pegboard_chat.parsing.constraint_size import too_many_states
from pegboard_chat.parsing.json_schema import subschemas
from pegboard_chat.parsing.regex_syntax import with_ascii_classes, without_anchors
from pegboard_structured_output_lm_format_enforcer.json_syntax import JsonSyntax
from pegboard_structured_output_lm_format_enforcer.limits import (
    MAX_STATES,
    literals,
    needs_plain_strings,
    patterns,
    rejection,
)

_SHARED = threading.Lock()

MASK_S = 2.0
"""Seconds of processor time that one mask may take."""

WHITE_SPACE = r" \t\n\r"
"""White space in JSON, as a character class."""


class Place:
    """A position in a text; immutable except for the mask, which is made once. syntax: the strict
    reader that runs alongside the parser, for JSON only."""

    __slots__ = ("mask", "parser", "syntax")

    def __init__(self, parser: Any, syntax: JsonSyntax | None) -> None:
        self.parser = parser
        self.syntax = syntax
        self.mask: np.ndarray | None = None

    @property
    def can_end(self) -> bool:
        return bool(self.parser.can_end()) and (self.syntax is None or self.syntax.can_end)

    def step(self, character: str) -> Place | None:
        syntax = None
        if self.syntax is not None and (syntax := self.syntax.step(character)) is None:
            return None
        if character not in self.parser.get_allowed_characters():
            return None
        return Place(self.parser.add_character(character), syntax)


class EnforcerState:
    """One completion. It holds the position after each accepted token."""

    def __init__(self, tokens: Tokens, places: list[Place]) -> None:
        self.tokens = tokens
        self.places = places

    def accept(self, token_ids: Sequence[int]) -> int:
        with _refusing():
            return self._accept(token_ids)

    def _accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            text = self.tokens.texts.get(token)
            place: Place | None = self.places[-1]
            for character in text or ():
                place = place.step(character) if place is not None else None
            if not text or place is None:
                return count
            self.places.append(place)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self.places[-num_tokens:]

    def fork(self) -> EnforcerState:
        return EnforcerState(self.tokens, list(self.places))


@contextmanager
def _refusing() -> Iterator[None]:
    """The library finds some keywords that it does not know only when the text gets there, and
    raises plain Exceptions."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"lm-format-enforcer: {text}", parameter="structured_outputs") from error


class LMFormatEnforcer:
    """Implements `pegboard.interfaces.structured_output.StructuredOutput`. The library is imported
    with the first constraint."""

    def __init__(self, options: None, setup: StructuredOutputSetup) -> None:
        self.setup = setup
        self._lock = threading.Lock()

    def reject(self, constraint: Constraint) -> str | None:
        return rejection(constraint)

    def compile(self, constraint: Constraint) -> EnforcerState:
        with self._lock:
            tokens = self._tokens
        odd = sorted(set().union(*literals(constraint)) - set(tokens.alphabet))
        if odd:
            raise RequestError(
                f"{odd[0]!r} is not contained in any token as a whole character",
                parameter="structured_outputs",
            )
        for pattern in patterns(constraint):
            if (reason := too_many_states(pattern, MAX_STATES)) is not None:
                raise RequestError(reason, parameter="structured_outputs")
        try:
            place = _start(constraint, tokens.alphabet)
            is_possible = tokens.allowed(place).any()
        except Exception as error:
            # the parsers raise plain Exceptions and those of two other libraries
            raise RequestError(
                " ".join(str(error).split()) or type(error).__name__, parameter="structured_outputs"
            ) from error
        if not is_possible:
            raise RequestError("no text fits the constraint", parameter="structured_outputs")
        return EnforcerState(tokens, [place])

    def fill(self, grammars: Sequence[EnforcerState], masks: np.ndarray) -> None:
        for grammar, mask in zip(grammars, masks, strict=True):
            place = grammar.places[-1]
            if place.mask is None:
                with _refusing():
                    place.mask = self._tokens.allowed(place)
            mask[:] = place.mask

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens(self.setup)


class Tokens:
    """texts: token id → text, for tokens that are whole characters. alphabet: all their
    characters."""

    def __init__(self, setup: StructuredOutputSetup) -> None:
        from lmformatenforcer.tokenizerprefixtree import TokenizerPrefixTree

        self.setup = setup
        special = setup.vocabulary.special_token_ids
        self.texts: dict[int, str] = {}
        for token, data in enumerate(setup.vocabulary.token_bytes):
            text = data.decode("utf-8", "ignore")
            if text and token not in special and text.encode() == data:
                self.texts[token] = text
        self.alphabet = "".join(sorted(set().union(*self.texts.values())))
        regular = [(token, text, False) for token, text in self.texts.items()]
        self._tree = TokenizerPrefixTree(regular, False, setup.vocab_size)
        self._plain = self._bits([token for token, text in self.texts.items() if "\\" not in text])
        self._printable = self._bits(
            [token for token, text in self.texts.items() if min(text) >= " "]
        )
        self._stops = self._bits(list(setup.stop_token_ids))
        self._strings: dict[tuple[int, int], np.ndarray] = {}
        self._spaces: dict[tuple[int, int], np.ndarray] = {}

    def allowed(self, place: Place) -> np.ndarray:
        """Returns the tokens that may come next, as bits: uint32 [words]. Raises RequestError if
        that takes too long."""
        if place.syntax is None and hasattr(place.parser, "current_state"):
            return self._after(place.parser)
        until_s = time.thread_time() + MASK_S
        ids: list[int] = []
        root = self._tree.root
        shortcut = place.parser.shortcut_key()
        if place.syntax is not None and place.syntax.in_string and isinstance(shortcut, tuple):
            # the library's shortcut for free text: only tokens that begin with " are left
            mask = self._in_string(*shortcut[1:])
            mask = mask & self._with_spaces(place.parser)
            if place.syntax.step("\\") is None:
                mask = mask & self._plain
            self._walk(place, root, ids, until_s, only='"')
        else:
            mask = np.zeros_like(self._stops)
            self._walk(place, root, ids, until_s)
        mask = mask | self._bits(ids)
        return mask | self._stops if place.can_end else mask

    def _walk(
        self, place: Place, node: Any, ids: list[int], until_s: float, only: str | None = None
    ) -> None:
        if time.thread_time() > until_s:
            raise RequestError(
                f"one mask took over {MASK_S:g} s; simplify the constraint",
                parameter="structured_outputs",
            )
        ids += node.tokens
        characters = node.children.keys() & set(place.parser.get_allowed_characters())
        for character in characters if only is None else characters & {only}:
            if (following := place.step(character)) is not None:
                self._walk(following, node.children[character], ids, until_s)

    def _after(self, parser: Any) -> np.ndarray:
        """Returns the tokens that may follow in the state of a regular expression. Each state is
        computed once."""
        from lmformatenforcer.regexparser import anything_else

        context = parser.context
        state = parser.current_state
        if not hasattr(context, "masks"):
            alphabet = context.pattern.alphabet
            context.masks = {}
            context.signs = {sign: alphabet[sign] for sign in alphabet if sign is not anything_else}
            context.other = alphabet.get(anything_else)
        if state not in context.masks:
            signs = context.signs
            other = context.other
            rows = context.pattern.map
            ids: list[int] = []
            waiting = [(self._tree.root, state)]
            while waiting:
                node, at = waiting.pop()
                ids += node.tokens
                row = rows.get(at, {})
                for character, child in node.children.items():
                    if (target := row.get(signs.get(character, other))) is not None:
                        waiting.append((child, target))
            mask = self._bits(ids)
            context.masks[state] = mask | self._stops if parser.can_end() else mask
        known: np.ndarray = context.masks[state]
        return known

    def _in_string(self, length: int, min_length: int, max_length: int) -> np.ndarray:
        """Returns the tokens that stay in a JSON string, or end it with their last character."""
        cache = self._tree.json_freetext_tokens
        key = (
            min(cache.max_token_len, max(0, min_length - length)),
            min(cache.max_token_len, max_length - length),
        )
        if key not in self._strings:
            self._strings[key] = (
                self._bits(cache.lookup_allowed_tokens(*key).allowed_tokens) & self._printable
            )
        return self._strings[key]

    def _with_spaces(self, parser: Any) -> np.ndarray:
        """Returns the tokens that keep consecutive white space within the library's limit. The
        library also counts white space in strings."""
        most = parser.config.max_consecutive_whitespaces
        key = max(0, most - parser.num_consecutive_whitespaces), most
        if key not in self._spaces:
            too_much = re.compile(
                rf"[{WHITE_SPACE}]{{{key[0] + 1}}}|.*[{WHITE_SPACE}]{{{most + 1}}}", re.S
            )
            self._spaces[key] = self._bits(
                [token for token, text in self.texts.items() if not too_much.match(text)]
            )
        return self._spaces[key]

    def _bits(self, token_ids: Sequence[int]) -> np.ndarray:
        allowed = np.zeros(-(-self.setup.vocab_size // 32) * 32, np.uint8)
        allowed[list(token_ids)] = 1
        return np.packbits(allowed, bitorder="little").view(np.uint32)


def _start(constraint: Constraint, alphabet: str) -> Place:
    from lmformatenforcer import JsonSchemaParser, RegexParser, StringParser, UnionParser
    from lmformatenforcer.characterlevelparser import CharacterLevelParserConfig

    config = CharacterLevelParserConfig(alphabet=alphabet)
    if constraint.kind == "choice":
        texts = json.loads(constraint.text)
        return Place(UnionParser([StringParser(text) for text in texts]), None)
    if constraint.kind == "regex":
        return Place(
            RegexParser(with_ascii_classes(without_anchors(constraint.text)), config), None
        )
    schema = json.loads(constraint.text) if constraint.kind == "json" else {"type": "object"}
    patterns: dict[str, Any] = {}
    for _, inner in subschemas(schema):
        if isinstance(inner, dict) and "pattern" in inner:
            inner["pattern"] = with_ascii_classes(without_anchors(inner["pattern"]))
            patterns[inner["pattern"]] = RegexParser(inner["pattern"], config)
    # the library keeps this cache for all schemas forever: only borrow it
    shared = JsonSchemaParser._Context.regex_parser_cache
    with _SHARED:
        shared.update(patterns)
        parser = JsonSchemaParser(schema, config)
        shared.clear()
    parser.context.regex_parser_cache = patterns
    return Place(parser, JsonSyntax(plain_strings=needs_plain_strings(schema)))
