"""The methods of a tokenizer of `transformers` that scripts use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pegboard.interfaces.tokenizer import Chat, Rendered, Vocabulary


class Encoding(dict[str, Any]):
    """A dict whose values are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class TransformersMethods(ABC):
    """A tokenizer plugin that derives from this class gives scripts the names of `transformers`:
    `LLM.get_tokenizer` returns the plugin. The plugin defines the methods of
    `pegboard.interfaces.tokenizer.Tokenizer`. Their arguments have the defaults of `transformers`
    and may be positional.

    The name of a token is its text. If several tokens have the same text, `get_vocab` has the first
    of them.
    """

    @abstractmethod
    def render(self, chat: Chat) -> Rendered: ...

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str: ...

    @abstractmethod
    def vocabulary(self) -> Vocabulary: ...

    # --- texts and ids ----------------------------------------------------------------------------

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """Return `input_ids` and `attention_mask`: lists for one text, lists of lists for
        several."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        several = [self.encode(one, add_special_tokens) for one in text]
        return Encoding(input_ids=several, attention_mask=[[1] * len(ids) for ids in several])

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each sequence."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> list[int] | str:
        """Return the prompt of a conversation: its token ids, or with tokenize=False its text.
        Raises RequestError if the template refuses the conversation."""
        chat = Chat(
            messages=conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
        )
        rendered = self.render(chat)
        if tokenize:
            return list(rendered.token_ids)
        return self.decode(rendered.token_ids) if rendered.text is None else rendered.text

    # --- tokens -----------------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[str]:
        """Return the names of the tokens of a text."""
        return [self._name(token) for token in self.encode(text, add_special_tokens=False)]

    def get_vocab(self) -> dict[str, int]:
        """Return token → id."""
        return dict(self._ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or the ids of several. An id is None if the vocabulary has no
        such token."""
        return (
            self._ids.get(tokens)
            if isinstance(tokens, str)
            else [self._ids.get(token) for token in tokens]
        )

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the name of a token, or the names of several."""
        return self._name(ids) if isinstance(ids, int) else [self._name(token) for token in ids]

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        return self.vocabulary().size

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.vocabulary().special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [self._name(token) for token in self.all_special_ids]

    @property
    def bos_token_id(self) -> int | None:
        return self.vocabulary().bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return next(iter(self.vocabulary().eos_token_ids), None)

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._name(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._name(self.eos_token_id)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {name: text for name, text in named.items() if text is not None}

    # Pegboard pads nothing, so no plugin says which token transformers would use.
    pad_token: str | None = None
    pad_token_id: int | None = None
    unk_token: str | None = None
    unk_token_id: int | None = None

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {self._name(token): token for token in reversed(range(self.vocab_size))}

    def _name(self, token: int) -> str:
        return self.decode([token])
