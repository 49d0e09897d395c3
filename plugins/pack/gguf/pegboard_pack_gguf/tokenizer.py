"""Tokenizer `gguf`: the vocabulary inside a GGUF file, without torch or transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.tokenizer import Chat, Rendered, TextStream, TokenizerSetup, Vocabulary
from pegboard_chat import ByteTextStream, ChatTemplate, TransformersMethods
from pegboard_pack_gguf.byte_level_bpe import ByteLevelBPE
from pegboard_pack_gguf.longest_match import LongestMatch
from pegboard_pack_gguf.sentencepiece_bpe import SentencePieceBPE
from pegboard_pack_gguf.special_tokens import partition
from pegboard_pack_gguf.unigram import Unigram
from pegboard_pack_gguf.vocabulary import CONTROL, UNKNOWN, GGUFVocabulary, end_token_ids
from pegboard_pack_gguf.word_piece import WordPiece


class Model(Protocol):
    """A way to turn text without special tokens into ids. vocabulary: of the file. adds_space: text
    after a special token, or at the start, gets a space before it. starts_with_space: ids of a
    whole text decode to a space too many. add_bos, adds_eos: what is added unless the file says it.
    bos_token_id, closing_id: what is added before and after a text."""

    adds_space: bool
    starts_with_space: bool
    add_bos: bool
    adds_eos: bool
    bos_token_id: int | None
    closing_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self) -> list[bytes]: ...


MODELS: dict[str, Callable[[GGUFVocabulary], Model]] = {
    "bert": WordPiece,
    "gpt2": ByteLevelBPE,
    "llama": SentencePieceBPE,
    "rwkv": LongestMatch,
    "t5": Unigram,
}
"""Tokenizer class by the value of `tokenizer.ggml.model`."""


class GGUFTokenizer(TransformersMethods):
    def __init__(self, options: None, setup: TokenizerSetup) -> None:
        vocabulary = GGUFVocabulary(setup.checkpoint.tokenizer.data)
        if vocabulary.model not in MODELS:
            raise ModelError(
                f"{vocabulary.path}: tokenizer.ggml.model is {vocabulary.model!r}; supported are "
                f"{', '.join(sorted(MODELS))}. Use the model's own tokenizer files instead"
            )
        self.model = MODELS[vocabulary.model](vocabulary)
        self.special_tokens = vocabulary.special_tokens()
        self.add_eos = vocabulary.flag("ggml.add_eos_token", self.model.adds_eos)
        self.token_bytes = self.model.token_bytes()
        self.hidden = frozenset(vocabulary.ids_of(UNKNOWN, CONTROL))
        self._vocabulary = Vocabulary(
            token_bytes=[
                b"" if token_id in self.hidden else text
                for token_id, text in enumerate(self.token_bytes)
            ],
            special_token_ids=self.hidden,
            eos_token_ids=tuple(end_token_ids(vocabulary.data)),
            bos_token_id=self.model.bos_token_id,
        )
        texts = {
            "bos_token": None
            if self.model.bos_token_id is None
            else vocabulary.tokens[self.model.bos_token_id],
            "eos_token": vocabulary.token_text("ggml.eos_token_id"),
            "unk_token": vocabulary.token_text("ggml.unknown_token_id"),
            "pad_token": vocabulary.token_text("ggml.padding_token_id"),
        }
        source = setup.chat_template or vocabulary.chat_templates()
        self.template = ChatTemplate(
            source, {name: text for name, text in texts.items() if text is not None}
        )

    def render(self, chat: Chat) -> Rendered:
        text = self.template.render(chat)
        return Rendered(self.encode(text, add_special_tokens=chat.add_special_tokens), text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # unpaired surrogates have no UTF-8 form
            raise RequestError(
                f"the text cannot be written as UTF-8: {error}", parameter="prompt"
            ) from error
        ids: list[int] = []
        if add_special_tokens and self.model.add_bos and self.model.bos_token_id is not None:
            ids.append(self.model.bos_token_id)
        behind_special = True
        for fragment in partition(text, self.special_tokens):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids += self.model.encode(
                    " " + fragment if behind_special and self.model.adds_space else fragment
                )
            behind_special = isinstance(fragment, int)
        if add_special_tokens and self.add_eos and self.model.closing_id is not None:
            ids.append(self.model.closing_id)
        return ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        stream = self.stream((), skip_special_tokens=skip_special_tokens)
        return (
            stream.push([token_ids] if isinstance(token_ids, int) else token_ids) + stream.flush()
        )

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """The space that SentencePiece puts before the first word is dropped only if no prompt
        precedes it."""
        stream = ByteTextStream(self.token_bytes, self.hidden, skip_special_tokens)
        return (
            UnspacedStream(stream)
            if self.model.starts_with_space and not prompt_token_ids
            else stream
        )

    def vocabulary(self) -> Vocabulary:
        return self._vocabulary


class UnspacedStream:
    """A stream that drops the space that `encode` put before its first word."""

    def __init__(self, stream: TextStream) -> None:
        self.rest = stream
        self.is_at_start = True

    def push(self, token_ids: Sequence[int]) -> str:
        return self._without_space(self.rest.push(token_ids))

    def flush(self) -> str:
        return self._without_space(self.rest.flush())

    def _without_space(self, text: str) -> str:
        if self.is_at_start and text:
            self.is_at_start = False
            return text.removeprefix(" ")
        return text
