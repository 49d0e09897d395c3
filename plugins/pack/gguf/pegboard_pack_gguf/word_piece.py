"""WordPiece (`tokenizer.ggml.model` "bert"): the longest piece at each place of a word, from left
to right.

Converters mark the first piece of a word with a ▁ and take the "##" from all others.
"""

from __future__ import annotations

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from pegboard_pack_gguf.sentencepiece_bpe import SPACE
from pegboard_pack_gguf.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, GGUFVocabulary

MAX_WORD_CHARS = 100
"""Longer words are unknown, as in BERT."""


class WordPiece:
    """Encodes text without special tokens, and knows the bytes of every token."""

    adds_space = False
    starts_with_space = True
    adds_eos = True

    def __init__(self, vocabulary: GGUFVocabulary) -> None:
        self.vocabulary = vocabulary
        self.add_bos = vocabulary.flag("ggml.add_bos_token", True)
        self.bos_token_id = vocabulary.token_id("ggml.bos_token_id")
        if self.bos_token_id is None:
            self.bos_token_id = vocabulary.token_id("ggml.cls_token_id")
        self.closing_id = vocabulary.token_id("ggml.seperator_token_id")  # spelled so in the format
        if self.closing_id is None:
            self.closing_id = vocabulary.token_id("ggml.eos_token_id")
        self.special = set(vocabulary.ids_of(UNKNOWN, CONTROL, USER_DEFINED))
        unknown = vocabulary.token_text("ggml.unknown_token_id") or "[UNK]"
        ids = {unknown: vocabulary.token_id("ggml.unknown_token_id") or 0}
        for token_id, token in enumerate(vocabulary.tokens):
            if token_id not in self.special:
                ids.setdefault(
                    token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}", token_id
                )
        lowers = vocabulary.flag("ggml.normalizer.lowercase", True)
        self.tokenizer = Tokenizer(
            models.WordPiece(vocab=ids, unk_token=unknown, max_input_chars_per_word=MAX_WORD_CHARS)
        )
        self.tokenizer.normalizer = normalizers.BertNormalizer(
            strip_accents=lowers, lowercase=lowers
        )
        self.tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def token_bytes(self) -> list[bytes]:
        return [
            (token if token_id in self.special else token.replace(SPACE, " ")).encode()
            for token_id, token in enumerate(self.vocabulary.tokens)
        ]
