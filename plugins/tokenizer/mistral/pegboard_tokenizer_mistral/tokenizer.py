"""The tokenizer `mistral`, based on mistral-common, without transformers and torch."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path

from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from pydantic import ValidationError

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.tokenizer import Chat, Rendered, TextStream, TokenizerSetup, Vocabulary
from pegboard_chat import ByteTextStream, ChatTemplate, TransformersMethods
from pegboard_chat.chat_template import check_end
from pegboard_chat.request_limits import num_text_chars, too_long
from pegboard_tokenizer_mistral.conversation import mistral_messages, mistral_tools, one_each
from pegboard_tokenizer_mistral.files import load, tokenizer_file
from pegboard_tokenizer_mistral.token_bytes import token_bytes

THINK = "[THINK]"
AUDIO = "[AUDIO]"


class MistralCommonTokenizer(TransformersMethods):
    """mistral-common writes chats as token ids, so a user's text cannot become a control token. If
    the server or a request gives a Jinja template, that template is rendered instead."""

    def __init__(self, options: None, setup: TokenizerSetup) -> None:
        directory = setup.checkpoint.tokenizer.directory
        if directory is None:
            raise ModelError(
                f"{setup.checkpoint.path}: there is no directory with tokenizer files; expected "
                "one with tekken.json"
            )
        self._mistral = load(tokenizer_file(Path(directory)))
        self._tokenizer = self._mistral.instruct_tokenizer.tokenizer
        self._special_ids = frozenset(
            i for i in range(self._tokenizer.n_words) if self._tokenizer.is_special(i)
        )
        self._is_tekken = isinstance(self._tokenizer, Tekkenizer)
        pieces = {
            self._tokenizer.id_to_piece(token_id): token_id
            for token_id in sorted(self._special_ids, reverse=True)
        }
        self._special_by_text = {text: token_id for text, token_id in pieces.items() if text}
        texts = sorted(self._special_by_text, key=len, reverse=True)
        self._special_texts = (
            re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else re.compile("(?!)")
        )
        self._writes_reasoning = THINK in pieces and self._tokenizer.version >= TokenizerVersion.v13
        self._has_template = setup.chat_template is not None
        inner = self._tokenizer
        named = {
            "bos_token": inner.id_to_piece(inner.bos_id),
            "eos_token": inner.id_to_piece(inner.eos_id),
        }
        self._template = ChatTemplate(setup.chat_template, named)
        self._lock = threading.Lock()
        self._bytes: list[bytes] | None = None
        self._vocabulary: Vocabulary | None = None

    def render(self, chat: Chat) -> Rendered:
        if self._has_template or chat.chat_template is not None:
            text = self._template.render(chat)
            return Rendered(self.encode(text, add_special_tokens=chat.add_special_tokens), text)
        return Rendered(self._encode_chat(chat))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # unpaired surrogates have no UTF-8 form
            raise RequestError(
                f"the text cannot be written as UTF-8: {error}", parameter="prompt"
            ) from error
        ids = [self._tokenizer.bos_id] if add_special_tokens else []
        for place, part in enumerate(self._special_texts.split(text)):
            if place % 2:
                ids.append(self._special_by_text[part])
                continue
            if place and not self._is_tekken:  # SentencePiece writes a space in front of every text
                part = part.removeprefix(" ")
            if part:
                ids += self._tokenizer.encode(part, bos=False, eos=False)
        return ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        stream = self.stream([], skip_special_tokens=skip_special_tokens)
        return (
            stream.push([token_ids] if isinstance(token_ids, int) else token_ids) + stream.flush()
        )

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        stream = ByteTextStream(self._token_bytes(), self._special_ids, skip_special_tokens)
        if self._is_tekken or any(
            token_id not in self._special_ids for token_id in prompt_token_ids
        ):
            return stream
        return FirstSpaceDropped(stream, self._special_ids)

    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            texts = [
                b"" if token_id in self._special_ids else text
                for token_id, text in enumerate(self._token_bytes())
            ]
            self._vocabulary = Vocabulary(
                texts, self._special_ids, (self._tokenizer.eos_id,), self._tokenizer.bos_id
            )
        return self._vocabulary

    def _token_bytes(self) -> list[bytes]:
        with self._lock:
            if self._bytes is None:
                self._bytes = token_bytes(self._tokenizer)
        return self._bytes

    def _encode_chat(self, chat: Chat) -> list[int]:
        check_end(chat)
        if chat.documents:
            raise RequestError(
                "the tokenizer 'mistral' has no place for documents; write them in a message",
                parameter="documents",
            )
        if (
            chat.max_chars is not None
            and (num_chars := num_text_chars(chat.messages)) > chat.max_chars
        ):
            raise too_long(num_chars, chat.max_chars, "messages")
        switches = _switches(chat)
        messages = mistral_messages(chat.messages, with_reasoning=self._writes_reasoning)
        if chat.continue_final_message and messages[-1]["role"] != "assistant":
            raise RequestError(
                "continue_final_message: the last message is not the assistant's",
                parameter="continue_final_message",
            )
        try:
            request: ChatCompletionRequest = ChatCompletionRequest.from_openai(
                # its type forbids null contents, which it takes
                messages,  # type: ignore[arg-type]
                tools=mistral_tools(chat.tools),
                **switches,
            )
            if chat.continue_final_message:
                request.messages[-1].prefix = True
            tokens = self._mistral.encode_chat_completion(request).tokens
            return one_each(tokens, self._special_by_text.get(AUDIO))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise RequestError(
                f"mistral-common refuses the chat: {place}: {first['msg']}", parameter="messages"
            ) from error
        except (
            MistralCommonException,
            ValueError,
            TypeError,
            AssertionError,
            ImportError,
        ) as error:
            raise RequestError(
                f"mistral-common refuses the chat: {error}", parameter="messages"
            ) from error


def _switches(chat: Chat) -> dict[str, str]:
    """Reads the only switch of Mistral's formats. Raises RequestError for any other switch."""
    effort = chat.template_kwargs.get("reasoning_effort")
    derived = (
        {"reasoning_effort", "enable_thinking"} if effort is not None else {"reasoning_effort"}
    )
    if unknown := sorted(chat.template_kwargs.keys() - derived):
        raise RequestError(
            "chat_template_kwargs: mistral-common writes the chats of this model, and it does "
            f"not know {unknown[0]!r}, only 'reasoning_effort'",
            parameter="chat_template_kwargs",
        )
    if effort is None:
        return {}
    if "reasoning_effort" not in ChatCompletionRequest.model_fields:
        raise RequestError(
            "reasoning_effort: the installed mistral-common is too old for it; install a newer one",
            parameter="reasoning_effort",
        )
    return {"reasoning_effort": effort}


class FirstSpaceDropped:
    """A stream of SentencePiece tokens at the beginning of a text. It drops the space that encoding
    added there."""

    def __init__(self, stream: ByteTextStream, special_token_ids: frozenset[int]) -> None:
        self._stream = stream
        self._special = special_token_ids
        self._is_done = False

    def push(self, token_ids: Sequence[int]) -> str:
        if self._is_done:
            return self._stream.push(token_ids)
        pieces = []
        for place, token_id in enumerate(token_ids):
            piece = self._stream.push([token_id])
            if piece and token_id not in self._special:
                self._is_done = True
                pieces += [piece.removeprefix(" "), self._stream.push(token_ids[place + 1 :])]
                break
            pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        return self._stream.flush()
