"""Incremental decoding: turns the token ids of one completion into text, never half a character.

`ByteTextStream` is for vocabularies whose tokens are byte strings; `OffsetTextStream` for all
others, where the text of a token depends on its neighbors and only a decoder function knows it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
_CONTEXT_SIZES = (5, 6, 7, 8, 16, 17, 18, 19, 40, 41, 42, 43)
_MAX_PENDING_TOKENS = 16
_MAX_UNFINISHED_TOKENS = 3


class ByteTextStream:
    """Joins the bytes of tokens and decodes them as UTF-8, in O(bytes) per push. The joined results
    of all pushes and `flush` equal the joined bytes decoded at once, with U+FFFD for invalid UTF-8.
    token_bytes: the bytes of every token; for a special token, those of its text. Ids outside of it
    give no text.
    """

    __slots__ = ("_decoder", "_skipped", "_token_bytes")

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_token_ids: frozenset[int],
        skip_special_tokens: bool,
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped = special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._token_bytes
        skipped = self._skipped
        size = len(table)
        data = b"".join([table[i] for i in token_ids if 0 <= i < size and i not in skipped])
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class OffsetTextStream:
    """Decodes a short window of the last tokens again for every push, and returns the text that is
    new at its end.

    The window begins with tokens whose text has been returned (at first the end of the prompt), so
    that the decoder sees neighbors. It moves on with every new text. Text that ends with U+FFFD may
    be half a character and is held back, for at most 16 tokens, which bounds the work per push.

    decode: text of token ids, with skipping of special tokens built in.
    """

    __slots__ = ("_decode", "_has_output", "_num_chars", "_read", "_window")

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window, self._read, self._num_chars = _context(decode, prompt_token_ids)
        self._has_output = False

    def push(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        self._has_output = True
        self._window.extend(token_ids)
        size = len(self._window)
        is_patient = size - self._read <= _MAX_PENDING_TOKENS
        # tokens of an unfinished character (at most 3) can spoil a whole run of byte tokens, so
        # also look before them
        for end in range(size, max(self._read, size - _MAX_UNFINISHED_TOKENS - 1), -1):
            text = self._decode(self._window[:end])
            if len(text) > self._num_chars and not text.endswith(REPLACEMENT):
                return self._advance(text, end)
            if end == size:
                whole = text
            if not text.endswith(REPLACEMENT):
                break
        if is_patient:
            return ""
        if len(whole) > self._num_chars:
            return self._advance(whole, size)
        # many tokens without text, such as skipped special ones, no longer count as context
        del self._window[self._read :]
        return ""

    def flush(self) -> str:
        return self._decode(self._window)[self._num_chars :] if self._has_output else ""

    def _advance(self, text: str, end: int) -> str:
        """Return the new part of `text`, which is the text of the window's tokens before `end`. The
        newest of these tokens become the context of the next ones."""
        new = text[self._num_chars :]
        start = max(self._read, end - _MAX_PENDING_TOKENS)
        self._window = self._window[start:]
        self._read = end - start
        self._num_chars = len(self._decode(self._window[: self._read]))
        return new


def _context(
    decode: Callable[[list[int]], str], prompt: Sequence[int]
) -> tuple[list[int], int, int]:
    """Return the first window: tokens from the end of the prompt, how many of them count as
    returned, and the length of their text in characters. Several lengths are tried. Context without
    text (skipped special tokens) does not show whether the output begins with a space, and context
    that begins inside a character can spoil the text after it. A prompt may also end inside a
    character, which the output then completes.
    """
    for num_unfinished in range(_MAX_UNFINISHED_TOKENS + 1):
        end = len(prompt) - num_unfinished
        for size in _CONTEXT_SIZES:
            start = max(0, end - size)
            text = decode(list(prompt[start:end])) if end > 0 else ""
            if text and not text.endswith(REPLACEMENT):
                return list(prompt[start:]), end - start, len(text)
            if start == 0:
                break
    window = list(prompt[-_CONTEXT_SIZES[0] :])
    return window, len(window), len(decode(window)) if window else 0
