"""The tokenizer compared with transformers, on small tokenizers that are trained here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pegboard_tokenizer_hf.tokenizer import HFTokenizer
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.tokenizer import Chat, TokenizerSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload

CORPUS = [
    "the quick brown fox jumps over the lazy dog. It's 3.14, isn't it?",
    "Straße, größer, naïve café; ein Wörterbuch der Möglichkeiten",
    "日本語のテキストと中文文本 한국어 텍스트",
    "Привет, мир! Γειά σου κόσμε. שלום עולם مرحبا بالعالم",
    "def f(x):\n    return x  +  1\n\n\tprint('😀 👩‍👩‍👧 🇩🇪')",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{%- if tools %}{{ '<|im_start|>tools' }}{% for tool in tools %}
{{ tool | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endif %}
{% for message in messages %}
    {%- if message.role == 'secret' %}{{ raise_exception('no secrets') }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function | tojson(indent=2) }}{% endfor %}{% endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}
    {%- else %}{{ message['content'] | trim }}{% endif %}
    {{- '<|im_end|>' + eos_token + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ bos_token }}<|im_start|>assistant
{% endif %}"""  # noqa: E501


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool_call>", "größer"])
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: BPE on characters, unknown characters as bytes, ▁ for spaces."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL, *pieces], show_progress=False
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [
        token for token in data["added_tokens"] if token["content"] not in pieces
    ]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False),
    )
    return tokenizer


FACTORIES = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "unigram": _unigram,
    "word_piece": _word_piece,
}
EOS = {"__type": "AddedToken", "content": "</s>", "special": True}
CONFIG = {"bos_token": "<s>", "eos_token": EOS, "pad_token": "<pad>", "unk_token": "<unk>"}


def _save(
    directory: Path,
    tokenizer: Tokenizer,
    config: dict | None = None,
    template: str | None = TEMPLATE,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    bos = tokenizer.token_to_id("<s>")
    eos = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(CONFIG if config is None else config)
    )
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def _open(
    directory: Path, *, checkpoint_template: str | None = None, chat_template: str | None = None
) -> HFTokenizer:
    payload = TokenizerPayload("hf", directory)
    checkpoint = Checkpoint(
        format="test",
        path=directory,
        config={},
        architectures=(),
        tensors={},
        tokenizer=payload,
        chat_template=checkpoint_template,
    )
    return HFTokenizer(None, TokenizerSetup(checkpoint, chat_template))


@pytest.fixture(scope="module", params=FACTORIES)
def pair(request, tmp_path_factory):
    """Returns our tokenizer and transformers', which both read the same files."""
    from transformers import PreTrainedTokenizerFast

    directory = _save(tmp_path_factory.mktemp(request.param), FACTORIES[request.param]())
    return _open(directory), PreTrainedTokenizerFast.from_pretrained(directory)


ODD = [
    " ",
    "  \n",
    "\t",
    "👩\u200d👧",
    "e\u0301",
    "\u200d",
    "<0x41>",
    "Ġ",
    "▁",
    "<tool_call>",
    "größer",
]
TEXTS = st.lists(
    st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from([*CORPUS, *SPECIAL, *ODD]),
    max_size=6,
).map("".join)
LIGHT = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(text=TEXTS, is_special=st.booleans())
@example("", True)
@LIGHT
def test_encode_and_decode_as_transformers(pair, text, is_special):
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens=is_special)
    assert ids == theirs(text, add_special_tokens=is_special)["input_ids"]
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


@given(data=st.data(), text=TEXTS, prompt=TEXTS, skip=st.booleans())
@LIGHT
def test_stream_joins_to_decode(pair, data, text, prompt, skip):
    ours, _ = pair
    # looks the same as a character that later output completes
    assume(not prompt.endswith("\ufffd"))
    prompt_ids = ours.encode(prompt, add_special_tokens=True)[:-1]
    ids = ours.encode(text, add_special_tokens=False)
    stream = ours.stream(prompt_ids, skip_special_tokens=skip)
    parts = []
    rest = ids
    while rest:
        size = data.draw(st.integers(1, 4))
        parts.append(stream.push(rest[:size]))
        rest = rest[size:]
    joined = "".join(parts) + stream.flush()
    before = ours.decode(prompt_ids, skip_special_tokens=skip)
    assert before + joined == ours.decode(prompt_ids + ids, skip_special_tokens=skip)
    assert not any(part.endswith("\ufffd") for part in parts) or "\ufffd" in text


@given(ids=st.lists(st.integers(-5, 600), max_size=30), skip=st.booleans())
@LIGHT
def test_byte_level_streams_are_exact_for_any_ids(byte_level, ids, skip):
    stream = byte_level.stream([1, 2], skip_special_tokens=skip)
    joined = "".join(stream.push([token_id]) for token_id in ids) + stream.flush()
    assert joined == byte_level.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return _open(_save(tmp_path_factory.mktemp("bytes"), _byte_level()))


@given(text=TEXTS)
@LIGHT
def test_vocabulary_bytes_join_to_the_decoded_text(pair, text):
    ours, _ = pair
    vocabulary = ours.vocabulary()
    ids = ours.encode(text, add_special_tokens=False)
    joined = b"".join(vocabulary.token_bytes[token_id] for token_id in ids).decode(
        "utf-8", "replace"
    )
    # decoders drop leading spaces
    assert joined.lstrip(" ") == ours.decode(ids, skip_special_tokens=True).lstrip(" ")


def test_vocabulary_names_the_special_tokens(pair):
    ours, theirs = pair
    vocabulary = ours.vocabulary()
    assert vocabulary.size == len(theirs)
    assert vocabulary.special_token_ids == {
        theirs.convert_tokens_to_ids(token) for token in SPECIAL
    }
    assert vocabulary.eos_token_ids == (theirs.eos_token_id,)
    assert vocabulary.bos_token_id == theirs.bos_token_id
    assert all(vocabulary.token_bytes[token_id] == b"" for token_id in vocabulary.special_token_ids)
    assert ours.vocabulary() is vocabulary


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "<ä>&'", "n": 1}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "äöü <&>", "parameters": {"type": "object"}},
    }
]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.text(st.characters(codec="utf-8"), max_size=15),
        },
        optional={"tool_calls": st.just([CALL]), "reasoning": st.just("because")},
    ),
    min_size=1,
    max_size=4,
)


@given(messages=MESSAGES, tools=st.sampled_from([None, TOOLS]), is_prompt=st.booleans())
@LIGHT
def test_chats_render_as_transformers_does(pair, messages, tools, is_prompt):
    ours, theirs = pair
    expected = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=is_prompt, tokenize=False
    )
    assert (
        ours.render(Chat(messages=messages, tools=tools, add_generation_prompt=is_prompt)).text
        == expected
    )


@given(messages=MESSAGES)
@LIGHT
def test_final_messages_are_continued_as_transformers_does(pair, messages):
    ours, theirs = pair
    expected = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    chat = Chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert ours.render(chat).text == expected


def test_special_tokens_named_only_by_the_config_are_special(tmp_path):
    tokenizer = _byte_level()
    tokenizer.add_tokens(["<end_of_turn>"])
    ours = _open(
        _save(
            tmp_path,
            tokenizer,
            {"eos_token": "<end_of_turn>", "additional_special_tokens": ["<tool_call>"]},
        )
    )
    ids = ours.encode("a<end_of_turn>b<tool_call>", add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=True) == "ab"
    assert ours.vocabulary().eos_token_ids == (tokenizer.token_to_id("<end_of_turn>"),)


def test_template_sources_in_their_order(tmp_path):
    chat = Chat(messages=[{"role": "user", "content": "x"}])
    _save(tmp_path, _word_piece(), template=None)
    with pytest.raises(RequestError, match="--chat-template"):
        _open(tmp_path).render(chat)
    assert _open(tmp_path, checkpoint_template="checkpoint").render(chat).text == "checkpoint"
    named = [
        {"name": "default", "template": "config"},
        {"name": "tool_use", "template": "config tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG | {"chat_template": named}))
    assert _open(tmp_path, checkpoint_template="checkpoint").render(chat).text == "config"
    assert _open(tmp_path).render(Chat(messages=chat.messages, tools=TOOLS)).text == "config tools"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "processor {{ bos_token }}"}')
    assert _open(tmp_path).render(chat).text == "processor <s>"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("jinja tools")
    assert _open(tmp_path).render(chat).text == "jinja"
    assert _open(tmp_path).render(Chat(messages=chat.messages, tools=TOOLS)).text == "jinja tools"
    assert (
        _open(tmp_path, chat_template="given")
        .render(Chat(messages=chat.messages, tools=TOOLS))
        .text
        == "given"
    )


def test_missing_and_damaged_files_are_named(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(
        ModelError, match=r"no tokenizer\.json, only tokenizer\.model.*save_pretrained"
    ):
        _open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizers library cannot read it"):
        _open(tmp_path)
    _save(tmp_path, _word_piece())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json contains a JSON list, expected an object"
    ):
        _open(tmp_path)


def test_text_that_is_no_unicode_is_refused(byte_level):
    with pytest.raises(RequestError, match="UTF-8"):
        byte_level.encode("\ud800", add_special_tokens=False)


def _changed(**parts):
    return {**json.loads(_word_piece().to_str()), **parts}


POST = {
    "type": "TemplateProcessing",
    "pair": [],
    "special_tokens": {},
    "single": [
        {"SpecialToken": {"id": "[NONE]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
}
GROWING = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 100}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"post_processor": POST}, "no entry found"),  # a panic, which is no Exception
        ({"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 4}}, "times as long"),
        ({"decoder": {"type": "Sequence", "decoders": [GROWING] * 4}}, "times as long"),
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 4_000_000_000}, "unk_token": "a"}},
            "token id 4000000000",
        ),
    ],
)
def test_tokenizers_that_would_fail_later_are_refused(tmp_path, parts, words):
    (tmp_path / "tokenizer.json").write_text(json.dumps(_changed(added_tokens=[], **parts)))
    with pytest.raises(ModelError, match=words):
        _open(tmp_path)


def test_a_text_that_the_tokenizer_cannot_encode_is_the_requests_error(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(_changed(added_tokens=[], post_processor=None, model=model))
    )
    tokenizer = _open(tmp_path)
    assert tokenizer.encode("a", add_special_tokens=False) == [0]
    with pytest.raises(RequestError, match="cannot encode the text"):
        tokenizer.encode("b", add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b'{"chat_template": [{"name": 5, "template": {}}]}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"extra_special_tokens": 5}'),
        ("chat_template.jinja", b"\xff\xfe"),
        ("special_tokens_map.json", b"[" * 100_000),
    ],
)
def test_odd_files_beside_the_tokenizer_are_model_errors(tmp_path, name, content):
    _save(tmp_path, _word_piece(), template=None)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError):
        _open(tmp_path)
