"""JSON as defined by RFC 8259, character by character. lm-format-enforcer also accepts text that is
not JSON (a comma before a closing brace, control characters in strings, "1.e5"); running both
excludes it."""

from __future__ import annotations

from typing import Literal

SPACE = frozenset(" \t\n\r")
DIGITS = frozenset("0123456789")
HEX = frozenset("0123456789abcdefABCDEF")
LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

State = Literal[
    "value",
    "first_item",
    "first_key",
    "key",
    "colon",
    "after",
    "string",
    "escape",
    "hex",
    "minus",
    "zero",
    "int",
    "dot",
    "fraction",
    "literal",
]
_NUMBER_ENDS = ("zero", "int", "fraction")


class JsonSyntax:
    """A position in a text; immutable. stack: open brackets. rest: the rest of a literal, or hex
    digits of an escape. Numbers have no exponents and no "-0", because after these the library
    accepts fractions as integers. plain_strings: no escapes."""

    __slots__ = ("_is_key", "_plain", "_rest", "_stack", "_state")

    def __init__(
        self,
        state: State = "value",
        stack: str = "",
        *,
        rest: str = "",
        is_key: bool = False,
        plain_strings: bool = False,
    ) -> None:
        self._state = state
        self._stack = stack
        self._rest = rest
        self._is_key = is_key
        self._plain = plain_strings

    @property
    def can_end(self) -> bool:
        """True if the text is a complete value."""
        return not self._stack and (self._state == "after" or self._state in _NUMBER_ENDS)

    @property
    def in_string(self) -> bool:
        """Any character is text."""
        return self._state == "string"

    def step(self, character: str) -> JsonSyntax | None:
        """Returns the next position, or None when the character is not allowed here."""
        state = self._state
        if state == "string":
            return self._in_string(character)
        if state == "escape":
            if character == "u":
                return self._at("hex", rest="xxxx")
            return self._at("string") if character in '"\\/bfnrt' else None
        if state == "hex":
            if character not in HEX:
                return None
            return (
                self._at("hex", rest=self._rest[1:]) if len(self._rest) > 1 else self._at("string")
            )
        if state == "literal":
            if character != self._rest[0]:
                return None
            return (
                self._at("literal", rest=self._rest[1:])
                if len(self._rest) > 1
                else self._at("after")
            )
        if state in ("minus", "zero", "int", "dot", "fraction"):
            return self._in_number(character)
        if character in SPACE:
            return self
        return self._between(character)

    def _at(
        self, state: State, stack: str | None = None, *, rest: str = "", is_key: bool | None = None
    ) -> JsonSyntax:
        return JsonSyntax(
            state,
            self._stack if stack is None else stack,
            rest=rest,
            is_key=self._is_key if is_key is None else is_key,
            plain_strings=self._plain,
        )

    def _in_string(self, character: str) -> JsonSyntax | None:
        if character == '"':
            return self._at("colon" if self._is_key else "after")
        if character == "\\":
            return None if self._plain else self._at("escape")
        return self if character >= " " else None

    def _in_number(self, character: str) -> JsonSyntax | None:
        state = self._state
        if state == "minus":
            return self._at("int") if character in DIGITS and character != "0" else None
        if character in DIGITS:
            return {"zero": None, "int": self, "dot": self._at("fraction"), "fraction": self}[state]
        if character == "." and state in ("zero", "int"):
            return self._at("dot")
        return self._at("after").step(character) if state in _NUMBER_ENDS else None

    def _between(self, character: str) -> JsonSyntax | None:
        state = self._state
        inside = self._stack[-1:]
        if state == "colon":
            return self._at("value") if character == ":" else None
        if state == "after":
            if character == "," and inside:
                return self._at("key" if inside == "{" else "value")
            return self._closed(character)
        if state in ("key", "first_key"):
            if character == '"':
                return self._at("string", is_key=True)
            return self._closed(character) if state == "first_key" else None
        if state == "first_item" and character == "]":
            return self._closed(character)
        return self._value(character)

    def _closed(self, character: str) -> JsonSyntax | None:
        fits = self._stack[-1:] + character in ("{}", "[]")
        return self._at("after", self._stack[:-1]) if fits else None

    def _value(self, character: str) -> JsonSyntax | None:
        if character == '"':
            return self._at("string", is_key=False)
        if character in "{[":
            return self._at(
                "first_key" if character == "{" else "first_item", self._stack + character
            )
        if character in DIGITS or character == "-":
            return self._at({("-"): ("minus"), ("0"): ("zero")}.get(character, ("int")))  # type: ignore[arg-type]
        return self._at("literal", rest=LITERALS[character]) if character in LITERALS else None
