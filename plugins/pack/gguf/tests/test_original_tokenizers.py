"""Vocabularies that the original libraries trained, written as converters write them, give the ids
of those libraries."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from pegboard_pack_gguf.longest_match import LongestMatch
from pegboard_pack_gguf.tokenizer import GGUFTokenizer
from pegboard_pack_gguf.unigram import Charsmap
from pegboard_pack_gguf.vocabulary import GGUFVocabulary
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertTokenizer

from pegboard.errors import ModelError
from pegboard.interfaces.tokenizer import TokenizerSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload

NORMAL = 1
CONTROL = 3
LINES = (
    "the quick brown fox jumps over the lazy dog and then it sleeps for a long time",
    "Zażółć gęślą jaźń, and crème brûlée! 1234 5678 90 (x + y) = z; don't we'll I'm",
    "日本語 と 中文 字符 mixed with words, ½ ﬁne ＡＢＣ tabs\tand   many    spaces",
    "print('hello world')  # a comment, 3.14159 and 0xFF",
)


def tokenizer(data: dict[str, Any]) -> GGUFTokenizer:
    checkpoint = Checkpoint(
        format="gguf",
        path=Path("m.gguf"),
        config={},
        architectures=(),
        tensors={},
        tokenizer=TokenizerPayload("gguf", data=data),
    )
    return GGUFTokenizer(None, TokenizerSetup(checkpoint, None))


def random_texts(count: int, more: str = "") -> list[str]:
    """Mixes of the lines' words and characters, and of spaces."""
    chosen = random.Random(0)
    words = (
        [word for line in LINES for word in line.split()]
        + list("".join(LINES))
        + list(more)
        + [" ", "  "]
    )
    return [
        chosen.choice(["", " "]).join(chosen.choices(words, k=chosen.randint(0, 12)))
        for _ in range(count)
    ]


def trained(kind: str, byte_fallback: bool = False, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Returns SentencePiece's tokenizer, and its data as a converter writes them."""
    model = io.BytesIO()
    corpus = (random.Random(1).choice(LINES) for _ in range(300))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus,
        model_writer=model,
        vocab_size=400 if byte_fallback else 150,
        model_type=kind,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        minloglevel=2,
        character_coverage=0.98,
        num_threads=1,
        **more,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    data = {
        "ggml.model": "llama" if kind == "bpe" else "t5",
        "ggml.tokens": [piece.piece for piece in proto.pieces],
        "ggml.scores": [piece.score for piece in proto.pieces],
        "ggml.token_type": [piece.type for piece in proto.pieces],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        "ggml.remove_extra_whitespaces": proto.normalizer_spec.remove_extra_whitespaces,
        "ggml.precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap),
    }
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), data


@pytest.mark.parametrize(
    ("byte_fallback", "settings"),
    [
        (False, {}),
        (True, {}),
        (False, {"add_dummy_prefix": False, "remove_extra_whitespaces": False}),
        (False, {"normalization_rule_name": "nmt_nfkc_cf"}),
        (True, {"normalization_rule_name": "identity"}),
    ],
    ids=str,
)
def test_unigram_equals_sentencepiece(byte_fallback: bool, settings: dict[str, Any]) -> None:
    original, data = trained("unigram", byte_fallback, **settings)
    found = tokenizer(data)
    for text in [*LINES, *random_texts(300, "ß…①Å\u0301€😀")]:
        assert found.encode(text, add_special_tokens=False) == original.encode(text), text
    assert found.encode("the", add_special_tokens=True) == [*original.encode("the"), 2]
    assert found.decode(original.encode("brown")) == "brown"


def test_sentencepiece_bpe_equals_sentencepiece() -> None:
    original, data = trained(
        "bpe", True, normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    found = tokenizer(data)
    for text in [*LINES, *random_texts(300, "ß…①Å\u0301€😀")]:
        assert found.encode(text, add_special_tokens=False) == original.encode(text), text


def test_byte_level_bpe_equals_tokenizers() -> None:
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    original.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    state = original.model.__getstate__()
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in json.loads(state)["merges"]
    ]
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    found = tokenizer(
        {"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": tokens, "ggml.merges": merges}
    )
    for text in [*LINES, *random_texts(300, "ß…①Å\u0301€😀")]:
        assert found.encode(text, add_special_tokens=False) == original.encode(text).ids, text


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_piece_equals_bert(lowercase: bool) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    model = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.train_from_iterator([line.lower() if lowercase else line for line in LINES], trainer)
    vocabulary = model.get_vocab()
    original = BertTokenizer(vocab=vocabulary, do_lower_case=lowercase)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    stored = [
        token if token in special else token[2:] if token.startswith("##") else f"▁{token}"
        for token in tokens
    ]
    found = tokenizer(
        {
            "ggml.model": "bert",
            "ggml.tokens": stored,
            "ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
            "ggml.unknown_token_id": vocabulary["[UNK]"],
            "ggml.bos_token_id": vocabulary["[CLS]"],
            "ggml.seperator_token_id": vocabulary["[SEP]"],
            "ggml.normalizer.lowercase": lowercase,
        }
    )
    for text in [*LINES, *random_texts(300, "ß…①Å\u0301€😀")]:
        assert found.encode(text) == original.encode(text), text
    ids = found.encode("the quick fox", add_special_tokens=False)
    assert found.decode(ids) == "the quick fox"


def test_rwkv_takes_the_longest_token() -> None:
    tokens = [
        "<s>",
        *(repr(bytes([byte]))[2:-1] for byte in range(256)),
        "ab",
        "abcd",
        "bcde",
        r"\n\n",
        r"\xc5\xbc",
        "\\\\x",
    ]
    found = LongestMatch(
        GGUFVocabulary(
            {
                "ggml.model": "rwkv",
                "ggml.tokens": tokens,
                "ggml.token_type": [CONTROL] + [NORMAL] * 262,
            }
        )
    )
    assert found.bytes_of[1:257] == [bytes([byte]) for byte in range(256)]
    chosen = random.Random(0)
    for _ in range(200):
        text = "".join(chosen.choices(["ab", "cd", "bcde", "\n", "ż", "\\x", "é", "'"], k=8))
        ids = found.encode(text)
        rest = text.encode()
        for token_id in ids:
            longest = max(
                (piece for piece in found.bytes_of[1:] if rest.startswith(piece)), key=len
            )
            assert found.bytes_of[token_id] == longest
            rest = rest[len(longest) :]
        assert not rest


def test_damaged_charsmaps() -> None:
    """Any bytes are refused, or replace something without an exception."""
    original, data = trained("unigram")
    healthy = data["ggml.precompiled_charsmap"]
    chosen = random.Random(0)

    def charsmap(stored: list[int]) -> Charsmap:
        return Charsmap(GGUFVocabulary({"ggml.tokens": ["a"], "ggml.precompiled_charsmap": stored}))

    for stored in ([1], [255] * 8, [0, 0, 0, 0, 1], healthy[:1000]):
        with pytest.raises(ModelError, match="precompiled_charsmap is damaged"):
            charsmap(stored)
    for _ in range(10):
        broken = list(healthy)
        for _ in range(300):
            broken[chosen.randrange(4, len(broken))] = chosen.randrange(256)
        for text in ("ﬁne ＡＢＣ ½", "plain"):
            assert isinstance(charsmap(broken).replaced(text), str)
