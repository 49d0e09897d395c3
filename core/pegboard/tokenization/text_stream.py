"""Incremental decoding: token ids of one completion in, text out, never half a character.

`ByteTextStream` is for vocabularies whose tokens are byte strings; `OffsetTextStream` for all others, where the text of a
token depends on its neighbors and only a decoder function knows it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5
_MAX_CONTEXT_TOKENS = 40
_MAX_PENDING_TOKENS = 16


class ByteTextStream:
    """Joins the bytes of tokens and decodes them as UTF-8. Costs O(bytes) per push.

    Joined pushes plus `flush` equal decoding the joined bytes at once, with U+FFFD for what is not UTF-8.

    token_bytes: bytes of every token, those of special tokens being their text; ids outside of it give nothing.
    """

    __slots__ = ("_decoder", "_skipped", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes], special_token_ids: frozenset[int], skip_special_tokens: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped = special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table, skipped = self._token_bytes, self._skipped
        size = len(table)
        data = b"".join([table[i] for i in token_ids if 0 <= i < size and i not in skipped])
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class OffsetTextStream:
    """Decodes a short window of the last tokens again and again and gives out what is new at its end.

    The window begins with tokens whose text is already out (at first the end of the prompt), so that the decoder sees
    neighbors; it moves on whenever new text came. Text that ends with U+FFFD may be half a character and is held back,
    for at most 16 tokens, which bounds the work per push.

    decode: text of token ids, with skipping of special tokens built in.
    """

    __slots__ = ("_decode", "_num_chars", "_read", "_window")

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        size = _CONTEXT_TOKENS
        while True:
            self._window = list(prompt_token_ids[-size:])
            # a prompt may end inside a character, which the output then completes
            text = decode(self._window).rstrip(REPLACEMENT) if self._window else ""
            size *= 2
            if text or size > min(2 * len(prompt_token_ids), _MAX_CONTEXT_TOKENS):
                break  # context without text (skipped special tokens) does not tell whether a space belongs between
        self._read = len(self._window)  # tokens of the window whose text is out
        self._num_chars = len(text)

    def push(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        is_new = len(text) > self._num_chars
        is_patient = len(self._window) - self._read <= _MAX_PENDING_TOKENS
        if is_new and not (text.endswith(REPLACEMENT) and is_patient):
            return self._advance(text)
        if not is_patient:  # many tokens without text, such as skipped special ones: they have no say any more
            del self._window[self._read :]
        return ""

    def flush(self) -> str:
        return self._decode(self._window)[self._num_chars :] if self._window else ""

    def _advance(self, text: str) -> str:
        """Everything of `text` is out; the tokens that just came become the context of the next ones."""
        new = text[self._num_chars :]
        del self._window[: self._read]
        del self._window[:-_MAX_PENDING_TOKENS]
        self._read = len(self._window)
        self._num_chars = len(self._decode(self._window))
        return new
