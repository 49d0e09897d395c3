"""The tokenizer `hf`, based on the `tokenizers` library, without transformers and torch."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pegboard.data.checkpoint_file import read_text
from pegboard.errors import ModelError, RequestError, is_failure
from pegboard.interfaces.tokenizer import Chat, Rendered, TextStream, TokenizerSetup, Vocabulary
from pegboard_chat import ByteTextStream, ChatTemplate, OffsetTextStream, TransformersMethods
from pegboard_tokenizer_hf.files import chat_templates, special_tokens
from pegboard_tokenizer_hf.token_bytes import bytes_of, growths, is_byte_level

_MAX_ID = 2**32 - 1
MAX_FILE_BYTES = 128 * 1024 * 1024
MAX_VOCABULARY = 33_554_432
MAX_GROWTH = 1024
"""How much longer the replacements of a normalizer or decoder may make a text. Above it, the work
never ends."""

LONG = 4096
"""From this many characters or ids on, a call takes so long that other threads must run
meanwhile."""


class HFTokenizer(TransformersMethods):
    """Reads tokenizer.json and the files next to it. `encode` adds the tokens (bos, eos) that the
    file's post-processor specifies."""

    def __init__(self, options: None, setup: TokenizerSetup) -> None:
        directory = _directory(setup)
        self._tokenizer = _load(directory)
        named, extra = special_tokens(directory)
        _mark_special(self._tokenizer, [*named.values(), *extra])
        added = self._tokenizer.get_added_tokens_decoder()
        self._added: Mapping[int, str] = {
            token_id: token.content for token_id, token in added.items()
        }
        self._special_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self._bos_id = self._id_of(named.get("bos_token"))
        self._eos_id = self._id_of(named.get("eos_token"))
        self._template = ChatTemplate(_template_source(setup, directory), named)
        self._decoder = _decoder_settings(self._tokenizer)
        self._lock = threading.Lock()
        self._token_bytes: list[bytes] | None = None
        self._vocabulary: Vocabulary | None = None

    def render(self, chat: Chat) -> Rendered:
        text = self._template.render(chat)
        return Rendered(self.encode(text, add_special_tokens=chat.add_special_tokens), text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            if len(text) >= LONG:  # only the methods for batches let other threads run meanwhile
                return self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )[0].ids
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:  # unpaired surrogates have no UTF-8 form
            raise RequestError(
                f"the text cannot be written as UTF-8: {error}", parameter="prompt"
            ) from error
        except BaseException as error:
            if not is_failure(error):
                raise
            raise RequestError(
                f"the model's tokenizer cannot encode the text: {error}", parameter="prompt"
            ) from error

    def encode_pair(
        self, text: str, second: str, *, limit: int | None
    ) -> tuple[list[int], list[int]]:
        tokenizer = self._tokenizer
        try:
            first, other = tokenizer.encode_batch([text, second], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(
                f"the texts cannot be written as UTF-8: {error}", parameter="prompt"
            ) from error
        if limit is not None:
            room = limit - tokenizer.num_special_tokens_to_add(is_pair=True)
            if room < 2:
                raise RequestError(
                    f"truncate_prompt_tokens={limit} leaves no token of a text",
                    parameter="truncate_prompt_tokens",
                )
            short, long = sorted((first, other), key=len)
            num_long = max(len(short), room - len(short))
            if len(short) + num_long > room:
                short.truncate(room // 2)
                num_long = room - room // 2
            long.truncate(num_long)
        whole = tokenizer.post_process(first, other)
        return whole.ids, whole.type_ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        valid = [token_id for token_id in ids if 0 <= token_id <= _MAX_ID]
        try:
            if len(valid) >= LONG:
                return self._tokenizer.decode_batch(
                    [valid], skip_special_tokens=skip_special_tokens
                )[0]
            return self._tokenizer.decode(valid, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ModelError(
                f"the model's tokenizer cannot decode its own tokens: {error}"
            ) from error

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        if is_byte_level(self._decoder):
            return ByteTextStream(self._all_token_bytes(), self._special_ids, skip_special_tokens)

        def decode(token_ids: list[int]) -> str:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return OffsetTextStream(decode, prompt_token_ids)

    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            texts = [
                b"" if token_id in self._special_ids else text
                for token_id, text in enumerate(self._all_token_bytes())
            ]
            eos = () if self._eos_id is None else (self._eos_id,)
            self._vocabulary = Vocabulary(texts, self._special_ids, eos, self._bos_id)
        return self._vocabulary

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _all_token_bytes(self) -> list[bytes]:
        """Bytes by id. For special tokens, they are the bytes of their text. Computed once, on
        first use."""
        with self._lock:
            if self._token_bytes is None:
                vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
                table = [b""] * (max(vocabulary.values(), default=-1) + 1)
                to_bytes = bytes_of(self._decoder)
                for token, token_id in vocabulary.items():
                    table[token_id] = to_bytes(token)
                # byte-level decoders treat added tokens like any others
                if not is_byte_level(self._decoder):
                    for token_id, text in self._added.items():
                        table[token_id] = text.encode()
                self._token_bytes = table
        return self._token_bytes


def _directory(setup: TokenizerSetup) -> Path:
    payload = setup.checkpoint.tokenizer
    if payload.directory is None:
        raise ModelError(
            f"{setup.checkpoint.path}: there is no directory with tokenizer files; expected one "
            "with tokenizer.json"
        )
    return Path(payload.directory)


def _load(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        others = [
            name
            for name in ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
            if (directory / name).is_file()
        ]
        raise ModelError(
            f"{directory}: there is no "
            f"tokenizer.json{', only ' + ', '.join(others) if others else ''}. Make one with the "
            "transformers library: "
            f"AutoTokenizer.from_pretrained({str(directory)!r})"
            f".save_pretrained({str(directory)!r}), "
            "or copy it from the model's repository; tekken.json and tokenizer.model.v* are read "
            "by the tokenizer 'mistral'"
        )
    text = read_text(path, MAX_FILE_BYTES)
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        _check(tokenizer)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ModelError(f"{path}: the tokenizers library cannot read it: {error}") from error
    return tokenizer


def _check(tokenizer: Tokenizer) -> None:
    """Raise ValueError for a tokenizer that could be read, but would fail or never end. What the
    library refuses is passed on: for example, a post-processor that adds an unknown token
    panics."""
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MAX_VOCABULARY:
        raise ValueError(f"it has the token id {largest}; expected less than {MAX_VOCABULARY}")
    for part in (tokenizer.normalizer, tokenizer.decoder):
        growth = 1 if part is None else math.prod(growths(json.loads(part.__getstate__())))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its replacements make a text up to {growth} times as long; expected at most "
                f"{MAX_GROWTH}"
            )
    tokenizer.encode("", add_special_tokens=True)
    tokenizer.decode([0, largest])


def _mark_special(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Make tokens special that tokenizer_config.json calls special, even if tokenizer.json lists
    them as plain words."""
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    missing = [
        token
        for token in dict.fromkeys(tokens)
        if token not in special and tokenizer.token_to_id(token) is not None
    ]
    if missing:
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in missing]
        )


def _template_source(setup: TokenizerSetup, directory: Path) -> str | dict[str, str] | None:
    if setup.chat_template is not None:
        return setup.chat_template
    return chat_templates(directory) or setup.checkpoint.chat_template


def _decoder_settings(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns the "decoder" part of tokenizer.json. It comes from the pickled state, because the
    library has no other way to read a decoder back."""
    decoder = tokenizer.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())
