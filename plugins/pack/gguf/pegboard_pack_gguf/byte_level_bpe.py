"""Byte-level BPE (`tokenizer.ggml.model` "gpt2") on the `tokenizers` library, built from the lists
in the file."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from pegboard.errors import ModelError
from pegboard_pack_gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from pegboard_pack_gguf.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, GGUFVocabulary


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes. Printable Latin-1 characters stand for themselves. The
    others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in sorted(printable)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


LONG = 4096
"""A text of this many characters takes so long that other threads must run meanwhile."""


class ByteLevelBPE:
    """Encodes text without special tokens, and knows the bytes of every token."""

    adds_space = starts_with_space = adds_eos = False

    def __init__(self, vocabulary: GGUFVocabulary) -> None:
        self.vocabulary = vocabulary
        self.pre_tokenizer = _pre_tokenizer(vocabulary)
        self.closing_id = vocabulary.token_id("ggml.eos_token_id")
        self.add_bos = vocabulary.flag("ggml.add_bos_token", self.pre_tokenizer.add_bos)
        self.bos_token_id = vocabulary.token_id("ggml.bos_token_id")
        self.size = len(vocabulary.tokens)
        self.tokenizer = self._build()

    def _build(self) -> Tokenizer:
        ids = {token: token_id for token_id, token in enumerate(self.vocabulary.tokens)}
        # A byte without a token must still separate its neighbors, so that they do not merge;
        # `encode` drops it.
        for stand_in in BYTE_ALPHABET:
            ids.setdefault(stand_in, len(ids) + self.size)
        merges = []
        for line in self.vocabulary.items("ggml.merges", str):
            cut = line.find(" ", 1)
            left = line[:cut]
            right = line[cut + 1 :]
            if cut < 0 or left not in ids or right not in ids or left + right not in ids:
                raise self.vocabulary.fail(
                    "ggml.merges", f"holds {line!r}, which does not join two tokens into a third"
                )
            merges.append((left, right))
        if not merges:
            raise self.vocabulary.fail("ggml.merges", "is missing or empty")
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=self.pre_tokenizer.ignore_merges)
        tokenizer = Tokenizer(model)
        cuts = [
            pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in self.pre_tokenizer.patterns
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        if len(text) >= LONG:  # only the methods for batches let other threads run meanwhile
            ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [token_id for token_id in ids if token_id < self.size]

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of every token. Special and user-defined tokens stand for their own
        text. Unused tokens have no text."""
        as_text = set(self.vocabulary.ids_of(UNKNOWN, CONTROL, USER_DEFINED))
        return [
            token.encode() if token_id in as_text else _bytes_of(token)
            for token_id, token in enumerate(self.vocabulary.tokens)
        ]


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def _pre_tokenizer(vocabulary: GGUFVocabulary) -> PreTokenizer:
    name = vocabulary.text("ggml.pre")
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    came = (
        "does not name its pre-tokenizer (it was converted before that was stored)"
        if name is None
        else f"uses {name!r}"
    )
    raise ModelError(
        f"{vocabulary.path} {came} in tokenizer.ggml.pre; guessing would give wrong tokens. Known "
        f"are {', '.join(sorted(PRE_TOKENIZERS))}. Use a file made for one of these, or the "
        "model's own tokenizer files"
    )
