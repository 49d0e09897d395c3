from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_pack_gguf.byte_level_bpe import BYTE_ALPHABET, ByteLevelBPE
from pegboard_pack_gguf.loader import GGUFLoader
from pegboard_pack_gguf.pre_tokenizers import PRE_TOKENIZERS
from pegboard_pack_gguf.sentencepiece_bpe import SPACE, SentencePieceBPE
from pegboard_pack_gguf.special_tokens import partition
from pegboard_pack_gguf.tokenizer import GGUFTokenizer
from pegboard_pack_gguf.vocabulary import GGUFVocabulary, SpecialToken

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.tokenizer import Chat, TokenizerSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload, WeightLoaderSetup

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
TOKENS_OF_LLAMA_CPP = Path(__file__).parent / "data" / "smollm2_tokens.json"
"""[text, ids] as llama.cpp tokenizes with the SmolLM2 file (parse_special, no bos)."""


def tokenizer(data: dict[str, Any], template: str | None = None) -> GGUFTokenizer:
    checkpoint = Checkpoint(
        format="gguf",
        path=Path("m.gguf"),
        config={},
        architectures=(),
        tensors={},
        tokenizer=TokenizerPayload("gguf", data=data),
    )
    return GGUFTokenizer(None, TokenizerSetup(checkpoint, template))


def byte_level_data(**more: Any) -> dict[str, Any]:
    """Every byte, a few merges, and special tokens."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "Ċ Ċ"]
    specials = ["<|im_start|>", "<|im_end|>", "<|im_end|>!", "<tool>"]
    tokens = [*BYTE_ALPHABET, *(merge.replace(" ", "") for merge in merges), *specials]
    types = [NORMAL] * (len(tokens) - 4) + [CONTROL, CONTROL, CONTROL, USER_DEFINED]
    eos = tokens.index("<|im_end|>")
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": merges,
        "ggml.bos_token_id": tokens.index("<|im_start|>"),
        "ggml.eos_token_id": eos,
    } | {key.replace("__", "."): value for key, value in more.items()}


def sentencepiece_data(
    words: list[str], scores: list[float] | None = None, **more: Any
) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    values = [0.0] * 259 + (scores or [-float(index) for index in range(len(words))])
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": values,
        "ggml.token_type": types,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    } | {key.replace("__", "."): value for key, value in more.items()}


def texts_of(found: GGUFTokenizer, ids: list[int]) -> list[str]:
    return [found.token_bytes[token_id].decode(errors="replace") for token_id in ids]


def test_byte_level_merges_and_special_tokens() -> None:
    found = tokenizer(byte_level_data())
    ids = found.encode("<|im_start|>hello hello123\n\n<|im_end|>!<tool>", add_special_tokens=False)
    assert texts_of(found, ids) == [
        "<|im_start|>",
        "hello",
        " hello",
        "123",
        "\n\n",
        "<|im_end|>!",
        "<tool>",
    ]
    assert found.decode(ids, skip_special_tokens=True) == "hello hello123\n\n<tool>"
    assert (
        found.decode(ids, skip_special_tokens=False)
        == "<|im_start|>hello hello123\n\n<|im_end|>!<tool>"
    )
    assert found.decode([10**6, *ids[:2], -1], skip_special_tokens=True) == "hello"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80))
def test_byte_level_round_trip_and_stream(text: str) -> None:
    found = tokenizer(byte_level_data())
    ids = found.encode(text, add_special_tokens=False)
    assert found.decode(ids, skip_special_tokens=False) == text
    stream = found.stream([1], skip_special_tokens=False)
    assert "".join(stream.push([token_id]) for token_id in ids) + stream.flush() == text


def test_bos_and_eos_follow_the_file() -> None:
    data = byte_level_data()
    bos = data["ggml.bos_token_id"]
    eos = data["ggml.eos_token_id"]

    def encoded(**more: Any) -> list[int]:
        return tokenizer(byte_level_data(**more)).encode("", add_special_tokens=True)

    assert encoded() == []
    assert encoded(ggml__add_bos_token=True, ggml__add_eos_token=True) == [bos, eos]
    assert encoded(ggml__pre="llama-bpe") == [bos]
    assert encoded(ggml__pre="llama-bpe", ggml__add_bos_token=False) == []
    found = tokenizer(byte_level_data(ggml__add_bos_token=True))
    assert (
        found.encode("12", add_special_tokens=False)
        == found.encode("12", add_special_tokens=True)[1:]
    )


def test_missing_bytes_are_dropped_but_keep_neighbors_apart() -> None:
    data = byte_level_data()
    keep = [index for index, token in enumerate(data["ggml.tokens"]) if token != "x"]
    data["ggml.tokens"], data["ggml.token_type"] = (
        [data[key][i] for i in keep] for key in ("ggml.tokens", "ggml.token_type")
    )
    found = tokenizer(data)
    assert texts_of(found, found.encode("hexllo", add_special_tokens=False)) == ["he", "ll", "o"]


def test_ignore_merges_takes_whole_words() -> None:
    data = byte_level_data(ggml__pre="llama-bpe")
    data["ggml.tokens"] = [*data["ggml.tokens"], "tree"]
    data["ggml.token_type"] = [*data["ggml.token_type"], NORMAL]
    found = tokenizer(data)
    assert texts_of(found, found.encode("tree", add_special_tokens=False)) == ["tree"]
    data["ggml.pre"] = "qwen2"
    assert len(tokenizer(data).encode("tree", add_special_tokens=False)) == 4


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "I'll 1234  a\n\nb", ["I", "'ll", " 1234", " ", " a", "\n", "\n", "b"]),
        ("smollm", "a 123 b", ["a", " ", "1", "2", "3", " b"]),
        ("llama-bpe", "I'LL 12345(x)\n\n y", ["I", "'LL", " ", "123", "45", "(x", ")\n\n", " y"]),
        ("qwen2", "v12 ok!\n", ["v", "1", "2", " ok", "!\n"]),
        ("tekken", "fooBar HTTPServer", ["foo", "Bar", " HTTPServer"]),
        ("gpt-4o", "don't1234", ["don't", "123", "4"]),
        ("deepseek-v3", "日本x1234,y", ["日本", "x", "123", "4", ",y"]),
        ("deepseek-coder", "a1é\n", ["a", "1", "é", "\n"]),
        ("deepseek-llm", "añb 12,日", ["a", "ñ", "b", " ", "12", ",", "日"]),
        ("falcon", "x1234=y`z", ["x", "123", "4", "=", "y", "`", "z"]),
        ("bloom", "a b.c", ["a", " b", ".", "c"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("qwen35", "e\u0301a", ["e\u0301a"]),
        ("seed-coder", "a;\nb", ["a", ";", "\n", "b"]),
        ("bailingmoe", "I'M a\n b", ["I", "'M", " a", "\n", " b"]),
        ("default", "a=12345", ["a", "=", "123", "45"]),
    ],
)
def test_pre_tokenizers(name: str, text: str, pieces: list[str]) -> None:
    model = ByteLevelBPE(GGUFVocabulary(byte_level_data(ggml__pre=name)))
    cut = model.tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [bytes(BYTE_ALPHABET[char] for char in piece).decode() for piece, _ in cut] == pieces


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=60), name=st.sampled_from(sorted(PRE_TOKENIZERS)))
def test_pre_tokenizers_lose_nothing(text: str, name: str) -> None:
    found = tokenizer(byte_level_data(ggml__pre=name))
    assert (
        found.decode(found.encode(text, add_special_tokens=False), skip_special_tokens=False)
        == text
    )


def test_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"uses 'brand-new' in tokenizer.ggml.pre.*smollm"):
        tokenizer(byte_level_data(ggml__pre="brand-new"))
    with pytest.raises(ModelError, match="does not name its pre-tokenizer"):
        tokenizer(byte_level_data(ggml__pre=None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.model": "plamo2"}, "'plamo2'; supported are bert, gpt2, llama, rwkv, t5"),
        ({"ggml.tokens": []}, "no vocabulary"),
        ({"ggml.tokens": [1, 2]}, "not a list of str"),
        ({"ggml.token_type": [1]}, "has 1 items for"),
        ({"ggml.merges": ["ab"]}, "holds 'ab'"),
        ({"ggml.merges": ["a b"]}, "holds 'a b'"),
        ({"ggml.merges": []}, "missing or empty"),
        ({"chat_template": 3}, "expected text"),
    ],
)
def test_senseless_vocabularies(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer(byte_level_data() | change)
    with pytest.raises(ModelError, match="has 2 items for"):
        tokenizer(sentencepiece_data(["a"]) | {"ggml.scores": [0.0, 1.0]})


def join_slowly(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece BPE by its definition: join the best pair of neighbors, leftmost first, again
    and again."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[ids[a + b]], at)
            for at, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if a + b in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[int] = []
    for piece in pieces:
        found += (
            [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        )
    return found


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32), crosses=st.booleans(), text=st.text(alphabet="ab c▁é", max_size=30)
)
def test_sentencepiece_equals_its_definition(seed: int, crosses: bool, text: str) -> None:
    pick = random.Random(seed)
    alphabet = "abc▁"
    words = {"".join(pick.choices(alphabet, k=pick.randint(1, 4))) for _ in range(40)} | {
        "a",
        "b",
        SPACE,
    }
    if not crosses:
        words = {word for word in words if SPACE not in word.lstrip(SPACE)}
    ordered = sorted(words)
    scores = [float(pick.randint(-6, 0)) for _ in ordered]
    model = SentencePieceBPE(GGUFVocabulary(sentencepiece_data(ordered, scores)))
    assert model.word_by_word == (not any(SPACE in word.lstrip(SPACE) for word in ordered))
    for _ in range(2):  # the second time from the cache
        assert model.encode(text) == join_slowly(text.replace(" ", SPACE), model.ids, model.scores)


def test_sentencepiece_spaces_bytes_and_special_tokens() -> None:
    found = tokenizer(
        sentencepiece_data(["▁a", "a", "▁", "b", "▁ab", "ab"], [-3, -5, -6, -5, -1, -2])
    )
    ids = found.encode("ab é<s>a", add_special_tokens=True)
    assert [found.model.vocabulary.tokens[i] for i in ids] == [
        "<s>",
        "▁ab",
        "▁",
        "<0xC3>",
        "<0xA9>",
        "<s>",
        "▁a",
    ]
    assert found.decode(ids, skip_special_tokens=True) == "ab é a"
    unspaced = tokenizer(
        sentencepiece_data(["▁a", "a"], ggml__add_space_prefix=False, ggml__add_bos_token=False)
    )
    assert texts_of(unspaced, unspaced.encode("a a", add_special_tokens=True)) == ["a", " a"]


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="ab é😀\n", max_size=20))
def test_sentencepiece_round_trip_and_stream(text: str) -> None:
    found = tokenizer(sentencepiece_data(["▁a", "a", "▁", "b", "▁ab"]))
    ids = found.encode(text, add_special_tokens=True)
    assert found.decode(ids, skip_special_tokens=True) == text
    stream = found.stream([], skip_special_tokens=True)
    assert "".join(stream.push([token_id]) for token_id in ids) + stream.flush() == text
    behind = found.stream([1], skip_special_tokens=True)
    assert behind.push(ids) + behind.flush() == (" " + text if text else "")


def test_partition_prefers_long_tokens() -> None:
    tokens = [SpecialToken("<ab>", 1), SpecialToken("b>c", 2), SpecialToken("<a", 3)]
    assert partition("x<ab>c<ab<ab>", tokens) == ["x", 1, "c", 3, "b", 1]
    assert partition("<ab><ab>", tokens) == [1, 1]
    assert partition("", tokens) == []
    strips = [SpecialToken("<e>", 4, strips_right=True)]
    assert partition("a <e> \n b<e> ", strips) == ["a ", 4, "b", 4]


def test_phi3_special_tokens_swallow_space() -> None:
    data = sentencepiece_data(["▁a", "a", "▁", "<|end|>"], name="Phi-3 mini")
    data["ggml.token_type"][-1] = CONTROL
    found = tokenizer(data)
    assert texts_of(found, found.encode("<|end|>\n a", add_special_tokens=False)) == [
        "<|end|>",
        " a",
    ]
    assert texts_of(found, found.encode("<s> a", add_special_tokens=False)) == ["<s>", " ", " a"]


def test_vocabulary() -> None:
    data = byte_level_data()
    found = tokenizer(data).vocabulary()
    assert found.size == len(data["ggml.tokens"])
    control = {index for index, kind in enumerate(data["ggml.token_type"]) if kind == CONTROL}
    assert found.special_token_ids == control
    assert all(found.token_bytes[index] == b"" for index in control)
    assert found.token_bytes[data["ggml.tokens"].index("Ġhello")] == b" hello"
    assert found.token_bytes[data["ggml.tokens"].index("<tool>")] == b"<tool>"
    assert sorted(found.token_bytes[: len(BYTE_ALPHABET)]) == [bytes([byte]) for byte in range(256)]
    assert found.eos_token_ids == (data["ggml.eos_token_id"],)
    assert found.bos_token_id == data["ggml.bos_token_id"]


def test_render() -> None:
    data = byte_level_data(
        chat_template=(
            "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        )
    )
    chat = Chat(messages=[{"role": "user", "content": "hi"}])
    assert tokenizer(data).render(chat).text == "<|im_start|>hi<|im_end|>"
    assert tokenizer(data, "{{ messages[0].content }}?").render(chat).text == "hi?"
    with pytest.raises(RequestError):
        tokenizer(byte_level_data()).render(chat)
    data["chat_template.tool_use"] = "tools"
    assert (
        tokenizer(data).render(Chat(messages=chat.messages, tools=[{"type": "function"}])).text
        == "tools"
    )


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> GGUFTokenizer:
    checkpoint = GGUFLoader(None, WeightLoaderSetup()).describe(LocalFiles(smollm2_gguf))
    return GGUFTokenizer(None, TokenizerSetup(checkpoint))


@pytest.mark.real_model
def test_smollm2_equals_llama_cpp(smollm2: GGUFTokenizer) -> None:
    cases = json.loads(TOKENS_OF_LLAMA_CPP.read_text())
    assert len(cases) > 200
    wrong = [text for text, ids in cases if smollm2.encode(text, add_special_tokens=True) != ids]
    assert wrong == []


@pytest.mark.real_model
def test_smollm2_chat(smollm2: GGUFTokenizer) -> None:
    text = smollm2.render(Chat(messages=[{"role": "user", "content": "Hi"}])).text
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode(text, add_special_tokens=False)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert smollm2.vocabulary().eos_token_ids == (2, 0)
