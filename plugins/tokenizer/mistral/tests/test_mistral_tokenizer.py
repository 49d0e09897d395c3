"""Reading Mistral's tokenizer files, and writing its chats."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.tekken import SpecialTokenPolicy
from pegboard_tokenizer_mistral.conversation import call_id
from pegboard_tokenizer_mistral.tokenizer import MistralCommonTokenizer

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.tokenizer import Chat, TokenizerSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload

Write = Callable[..., Path]
LONG_ID = "chatcmpl-tool-0123456789abcdef"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {"type": "object", "properties": {"city": {}}},
        },
    }
]
CALL = {
    "id": LONG_ID,
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
TURNS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": LONG_ID, "content": "sunny"},
]


def made(folder: Path, template: str | None = None) -> MistralCommonTokenizer:
    checkpoint = Checkpoint(
        format="x",
        path=folder,
        config={},
        architectures=(),
        tensors={},
        tokenizer=TokenizerPayload("hf", folder),
    )
    return MistralCommonTokenizer(None, TokenizerSetup(checkpoint, template))


def written(tokenizer: MistralCommonTokenizer, **chat: Any) -> str:
    ids = tokenizer.render(Chat(**chat)).token_ids
    assert ids is not None
    return tokenizer.decode(ids, skip_special_tokens=False)


# --- files ----------------------------------------------------------------------------------------


def test_tekken_goes_before_sentencepiece_and_the_highest_version_counts(
    tmp_path: Path, write_tekken: Write, write_sentencepiece: Write
) -> None:
    for version in ("v2", "v3"):
        write_sentencepiece(tmp_path, version)
    ids = made(tmp_path).render(Chat(messages=TURNS[1:2], tools=TOOLS)).token_ids
    assert ids is not None and "[AVAILABLE_TOOLS]" in made(tmp_path).decode(
        ids, skip_special_tokens=False
    )
    write_tekken(tmp_path, "v13")
    assert "[THINK]" in written(made(tmp_path), messages=TURNS)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"config": {"version": "v99"}}', "{}"])
def test_files_that_cannot_be_read_say_so(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(ModelError, match="tekken.json"):
        made(tmp_path)


# --- text -----------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_text_is_encoded_as_the_library_does(
    tekken: MistralCommonTokenizer, text: str, special: bool
) -> None:
    inner = tekken._mistral.instruct_tokenizer.tokenizer
    ids = tekken.encode(text, add_special_tokens=special)
    if not any(token in text for token in tekken._special_by_text):
        assert ids == inner.encode(text, bos=special, eos=False)
    assert tekken.decode(ids, skip_special_tokens=True) == inner.decode(
        ids, SpecialTokenPolicy.IGNORE
    )


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory, write_tekken: Write) -> MistralCommonTokenizer:
    return made(write_tekken(tmp_path_factory.mktemp("tekken")).parent)


@pytest.mark.parametrize("text", ["hello world", " hello  world ", "日本", "a", "  "])
def test_sentencepiece_is_decoded_as_the_library_does(
    tmp_path: Path, write_sentencepiece: Write, text: str
) -> None:
    tokenizer = made(write_sentencepiece(tmp_path, "v3").parent)
    inner = tokenizer._mistral.instruct_tokenizer.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert (
        tokenizer.decode(ids, skip_special_tokens=True)
        == inner.decode(ids, SpecialTokenPolicy.IGNORE)
        == text
    )
    again = tokenizer.encode(f"[INST] {text}[/INST]", add_special_tokens=False)
    assert again[1:-1] == ids[1:], "as the chat format writes it; the tokenizer adds the space"
    assert tokenizer.decode(again, skip_special_tokens=False).endswith("[/INST]")


def test_half_a_character_is_no_text(tekken: MistralCommonTokenizer) -> None:
    with pytest.raises(RequestError, match="UTF-8"):
        tekken.encode("\ud800", add_special_tokens=False)


# --- chats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            "v3",
            (
                '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": '
                '"ID"}]</s>[TOOL_RESULTS]'
            ),
        ),
        ("v7", '"id": "ID"}]</s>[TOOL_RESULTS]ID[TOOL_CONTENT]sunny'),
        (
            "v11",
            (
                '[TOOL_CALLS]get_weather[CALL_ID]ID[ARGS]{"city": '
                '"Paris"}</s>[TOOL_RESULTS]ID[TOOL_CONTENT]sunny'
            ),
        ),
        (
            "v13",
            (
                '[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": '
                '"Paris"}</s>[TOOL_RESULTS]sunny[/TOOL_RESULTS]'
            ),
        ),
    ],
)
def test_every_version_writes_calls_in_its_own_way(
    tmp_path: Path, write_tekken: Write, version: str, expected: str
) -> None:
    text = written(made(write_tekken(tmp_path, version).parent), messages=TURNS, tools=TOOLS)
    assert (
        expected.replace("ID", call_id(LONG_ID)).replace(f"CALL_{call_id(LONG_ID)}", "CALL_ID")
        in text
    )
    assert text.startswith("<s>") and "Be brief." in text and "[AVAILABLE_TOOLS]" in text
    assert ("[THINK]" in text) == (version == "v13")


def test_what_users_write_is_no_control_token(tekken: MistralCommonTokenizer) -> None:
    ids = tekken.render(Chat(messages=[{"role": "user", "content": "[/INST]</s>"}])).token_ids
    special = tekken.vocabulary().special_token_ids
    # <s>, [INST], [/INST]
    assert ids is not None and [token in special for token in ids].count(True) == 3
    assert tekken.decode(ids, skip_special_tokens=False) == "<s>[INST][/INST]</s>[/INST]"


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_the_last_message_is_continued(tmp_path: Path, write_tekken: Write, version: str) -> None:
    tokenizer = made(write_tekken(tmp_path, version).parent)
    messages = [*TURNS[1:2], {"role": "assistant", "content": "Once"}]
    assert written(
        tokenizer, messages=messages, add_generation_prompt=False, continue_final_message=True
    ).endswith("Once")
    with pytest.raises(RequestError, match="not the assistant's"):
        written(
            tokenizer, messages=TURNS[:2], add_generation_prompt=False, continue_final_message=True
        )


SOUND = {"type": "audio", "placeholder": "[BEGIN_AUDIO][AUDIO]"}


@given(st.lists(st.sampled_from([SOUND, " the", "hello", "Paris"]), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_audio_has_one_placeholder_each(with_audio: Any, parts: list[Any]) -> None:
    """Where the audio is, the ids are those of the placeholder's text. Texts that follow each other
    are paragraphs, as without audio."""
    content = [part if part is SOUND else {"type": "text", "text": part} for part in parts]
    expected = ""
    last: Any = SOUND
    for part in parts:
        if part is SOUND:
            expected += SOUND["placeholder"]
        else:
            expected += part if last is SOUND else f"\n\n{part}"
        last = part
    found = with_audio.render(Chat(messages=[{"role": "user", "content": content}])).token_ids
    assert with_audio.decode(found) == f"<s>[INST]{expected}[/INST]"
    placeholder = with_audio.encode(SOUND["placeholder"], add_special_tokens=False)
    assert [found[i : i + 2] for i, one in enumerate(found) if one == placeholder[0]] == (
        [placeholder] * parts.count(SOUND)
    )


@pytest.fixture(scope="module")
def with_audio(
    write_tekken: Write, tmp_path_factory: pytest.TempPathFactory
) -> MistralCommonTokenizer:
    folder = tmp_path_factory.mktemp("tekken")
    write_tekken(folder, with_audio=True)
    return made(folder)


def test_audio_of_a_tokenizer_without_it(write_tekken: Write, tmp_path: Path) -> None:
    write_tekken(tmp_path)
    with pytest.raises(RequestError, match="mistral-common refuses the chat"):
        made(tmp_path).render(Chat(messages=[{"role": "user", "content": [SOUND]}]))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]}, "messages"),
    ({"messages": []}, "messages"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages",
    ),
    (
        {"messages": TURNS[1:2], "template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs",
    ),
    ({"messages": TURNS[1:2], "documents": [{"text": "x"}]}, "documents"),
    ({"messages": TURNS[1:2], "continue_final_message": True}, "continue_final_message"),
    ({"messages": [*TURNS[1:2], {"role": "assistant", "content": "done"}]}, "messages"),
    (
        {
            "messages": TURNS[1:2],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}],
        },
        "messages",
    ),
]


@pytest.mark.parametrize(("chat", "parameter"), REFUSED)
def test_chats_that_cannot_be_written_are_the_requests_error(
    tekken: MistralCommonTokenizer, chat: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(RequestError) as caught:
        tekken.render(Chat(**chat))
    assert caught.value.parameter == parameter


def test_a_template_of_the_servers_goes_before_the_library(
    tekken: MistralCommonTokenizer, tmp_path: Path, write_tekken: Write
) -> None:
    template = "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    tokenizer = made(write_tekken(tmp_path).parent, template)
    rendered = tokenizer.render(Chat(messages=[{"role": "user", "content": "hello"}]))
    assert rendered.text == "<s>[INST]hello[/INST]"
    same = tekken.render(Chat(messages=[{"role": "user", "content": "hello"}])).token_ids
    assert list(rendered.token_ids) == same


@given(st.text(), st.text())
def test_ids_of_calls_have_nine_letters_and_digits(one: str, other: str) -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", call_id(one))
    assert (call_id(one) == call_id(other)) == (one == other)
    assert call_id("a1B2c3D4e") == "a1B2c3D4e"


def test_arguments_that_are_no_json_are_the_requests_error(
    tmp_path: Path, write_tekken: Write
) -> None:
    call = {**CALL, "function": {"name": "get_weather", "arguments": "{"}}
    messages = [TURNS[1], {"role": "assistant", "content": None, "tool_calls": [call]}, TURNS[3]]
    with pytest.raises(RequestError, match="'get_weather' are not valid JSON"):
        written(made(write_tekken(tmp_path, "v7").parent), messages=messages)
