"""Images, audio and video in prompts: which item a placeholder stands for, what the engine gets,
and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.media import MediaItem, MediaSource, take_media
from pegboard.data.pooling_params import Pooling, PoolingParams
from pegboard.data.request import EngineRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import ConfigError, PluginError, RequestError
from pegboard.front.beam_search import longer
from pegboard.front.media import adapter_of
from pegboard.front.prompt_forms import as_prompt
from pegboard.front.prompts import RequestBuilder
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.multimodal_processor import MediaReaderSetup
from pegboard.interfaces.tokenizer import Chat
from pegboard.plugins.registry import Registry
from pegboard_testing.echo_engine import echo_plan
from pegboard_testing.fake_client import BOS, ByteTokenizer
from pegboard_testing.fake_distributions import FakeDistributions, spec_source

SOURCE = '''
import numpy as np
from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import Placeholder, Processed

class Reader:
    """The text of an item is its value and its identity."""

    def __init__(self, setup):
        self.setup = setup
        self.read_values = []

    def read(self, source):
        self.read_values.append(source.value)
        return source.value, source.value.encode()

class Processor:
    """Every letter becomes a row, with its number as the token; a dot is a token without a row."""

    def __init__(self, options, setup):
        self.calls = []

    def placeholder(self, modality):
        text = f"<{modality[0]}>"
        return Placeholder(text, tuple(text.encode()))

    def process(self, modality, value, options):
        self.calls.append((modality, value, dict(options)))
        if value == "red":
            raise RequestError("it is red")
        if value == "bug":
            raise KeyError(value)
        if value == "none":
            return None
        letters = np.array([ord(letter) for letter in value], np.int32)
        is_row = letters != ord(".")
        return Processed(letters.tolist(), {"letters": letters}, is_row, {"size": len(value)})

    def inputs(self, token_ids, items):
        numbers = [0] * len(token_ids)
        for item in items:
            numbers[item.start : item.stop] = [item.facts["size"]] * (item.stop - item.start)
        return {"sizes": numbers}

class First(Processor):
    """Images come before the prompt."""

    def placeholder(self, modality):
        if modality == "image":
            return Placeholder("", tuple(b"ok"), is_first=True, ending=tuple(b"!?"))
        return Processor.placeholder(self, modality)

class Counted(Processor):
    """Of two images, each has one row."""

    def counted_options(self, counts):
        return {"most": 1} if counts.get("image", 0) > 1 else {}

    def process(self, modality, value, options):
        return Processor.process(self, modality, value[: options.get("most")], options)

class Numbering(Processor):
    """Items of one letter have no number. The authors of the model write [i]."""

    def rewritten(self, text):
        return text.replace("[i]", "<i>")

    def heading(self, modality, number, facts):
        return f"{modality[0]}{number}:".encode() if facts["size"] > 1 else ()

class Beginning(Processor):
    """Images come after the token that begins the prompt."""

    def placeholder(self, modality):
        begin = tuple(b"^")
        return Placeholder("", begin, is_first=True, beginning=begin)

class Padding(Processor):
    """Texts have ten tokens."""

    def padded(self, token_ids):
        if 0 in token_ids:
            raise KeyError(0)
        return (*token_ids, *[7] * (10 - len(token_ids)))
'''
MakeBuilder = Callable[..., RequestBuilder]


@pytest.fixture
def make_builder(fake_distributions: FakeDistributions) -> MakeBuilder:
    specs = {
        name: spec_source(
            "multimodal_processor",
            implementation=f"acme_media_code:{kind}",
            reader="acme_media_code:Reader",
            modalities=("image", "audio"),
        )
        for name, kind in (
            ("acme_media", "Processor"),
            ("acme_first", "First"),
            ("acme_numbering", "Numbering"),
            ("acme_beginning", "Beginning"),
            ("acme_padding", "Padding"),
            ("acme_counted", "Counted"),
        )
    }
    names = {
        "Echo": "acme_media",
        "First": "acme_first",
        "Beginning": "acme_beginning",
        "Numbering": "acme_numbering",
        "Padding": "acme_padding",
        "Counted": "acme_counted",
    }
    entry = {"multimodal_processor": {name: f"{module}:SPEC" for name, module in names.items()}}
    fake_distributions.add("acme-media", entry, {**specs, "acme_media_code": SOURCE})
    registry = Registry(fake_distributions.scan())

    def make(name: str = "Echo", **engine: Any) -> RequestBuilder:
        plan = replace(echo_plan(**engine), multimodal_processor=f"acme-media:{name}")
        return RequestBuilder(plan, ByteTokenizer(), registry)

    return make


def built(builder: RequestBuilder, prompt: Any, **params: Any) -> EngineRequest:
    return builder.build(as_prompt(prompt), SamplingParams(**params), "r")


def data(text: str, image: Any = None, **more: Any) -> dict[str, Any]:
    media = {name: value for name, value in {"image": image, **more}.items() if value is not None}
    return {"prompt": text, "multi_modal_data": media}


def test_items_take_the_places_of_their_placeholders(make_builder: MakeBuilder) -> None:
    builder = make_builder()
    assert builder.placeholders == {"image": "<i>", "audio": "<a>"}
    request = built(builder, data("x<i>y<a><i>", ["ab", "c..de"], audio="f"))
    assert request.prompt_token_ids == [BOS, *b"xabyfc..de"]
    shown = [(item.modality, item.places) for item in request.media]
    assert shown == [
        ("image", ((2, 2),)),
        ("audio", ((5, 1),)),
        ("image", ((6, 1), (9, 2))),
    ]
    assert request.token_inputs == {"sizes": [0, 0, 2, 2, 0, 1, 5, 5, 5, 5, 5]}
    last = request.media[2]
    assert (last.start, last.stop, last.num_rows) == (6, 11, 3)
    array = last.arrays["letters"]
    assert (array.dtype, array.shape, len(array.data)) == ("int32", (5,), 20)


def test_items_have_numbers(make_builder: MakeBuilder) -> None:
    """Each modality has its own. A number is not a part of its item."""
    prompt = data("x<i>y<a><i><i>", ["ab", "c", "ab"], audio="fg")
    request = built(make_builder("Numbering"), prompt)
    assert request.prompt_token_ids == [BOS, *b"xi0:abya0:fgci2:ab"]
    first, _, _, last = request.media
    assert (first.places, last.places) == (((5, 2),), ((17, 2),))
    assert first.digest == last.digest
    assert request.token_inputs["sizes"] == [
        0,
        0,
        0,
        0,
        0,
        2,
        2,
        0,
        0,
        0,
        0,
        2,
        2,
        1,
        0,
        0,
        0,
        2,
        2,
    ]


def test_placeholders_of_authors(make_builder: MakeBuilder) -> None:
    """In texts and in chats, whose tokens have no others. Token ids stay as they are."""
    builder = make_builder("Numbering")
    assert built(builder, data("x[i]<i>y", ["c", "d"])).prompt_token_ids == [BOS, *b"xcdy"]
    chat = Chat(messages=[])
    (image,) = as_prompt(data("[i]", "c")).media
    for text, expected in (("x[i]y", b"xcy"), ("x<i>y", b"xcy")):
        rendered = Prompt(text=text, token_ids=[*text.encode()], chat=chat, media=[image])
        assert builder.build(rendered, SamplingParams(), "r").prompt_token_ids == [*expected]
    both = Prompt(text="[i]", token_ids=[*b"1<i>"], media=[image])
    assert builder.build(both, SamplingParams(), "r").prompt_token_ids == [*b"1c"]


def test_a_placeholder_may_be_out_of_the_vocabulary(make_builder: MakeBuilder) -> None:
    """ "i" is, and so is "x", which is in no placeholder."""
    builder = make_builder()
    builder.plan = replace(builder.plan, vocab_size=ord("i"))
    image = {"multi_modal_data": {"image": "AB"}}
    request = built(builder, {"prompt_token_ids": [*b"A<i>"], **image})
    assert request.prompt_token_ids == [*b"AAB"]
    with pytest.raises(RequestError, match=r"token id 120 is out of vocabulary \(size 105\)"):
        built(builder, {"prompt_token_ids": [*b"<i>x"], **image})
    for prompt in ({"prompt_token_ids": [*b"A<i>"]}, {"prompt_token_ids": [*b"<i>i"], **image}):
        with pytest.raises(RequestError, match="token id 105 is out of vocabulary"):
            built(builder, prompt)


def test_items_before_the_prompt(make_builder: MakeBuilder) -> None:
    """They need no placeholder, and those of other modalities do."""
    builder = make_builder("First")
    assert builder.placeholders == {"image": "", "audio": "<a>"}
    request = built(builder, data("x<a>y", ["ab", "c..de"], audio="f"))
    assert request.prompt_token_ids == [*b"abc..de", BOS, *b"xfy!?"]
    shown = [(item.modality, item.places) for item in request.media]
    assert shown == [
        ("image", ((0, 2),)),
        ("image", ((2, 1), (5, 2))),
        ("audio", ((9, 1),)),
    ]
    assert request.token_inputs == {"sizes": [2, 2, 5, 5, 5, 5, 5, 0, 0, 1, 0, 0, 0]}
    assert built(builder, data("xy")).prompt_token_ids == [BOS, *b"xy"]
    with pytest.raises(RequestError, match="fewer placeholders '<a>' than items of type audio"):
        built(builder, data("x", "ab", audio="f"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"ok<a>y", b"abcdfy!?"),
        (b"o<a>k!?", b"abcdofk!?"),
        (b"<a>ok!", b"abcdfok!!?"),
        (b"ok<a>ok", b"abcdfok!?"),
    ],
)
def test_the_ends_of_a_prompt(make_builder: MakeBuilder, text: bytes, expected: bytes) -> None:
    """The first tokens are left out for an item, and the last ones are not written twice."""
    items = {"image": ["ab", "cd"], "audio": "f"}
    prompt = {"prompt_token_ids": [*text], "multi_modal_data": items}
    request = built(make_builder("First"), prompt)
    assert request.prompt_token_ids == [*expected]


def test_a_prompt_without_items_before_it_stays(make_builder: MakeBuilder) -> None:
    prompt = {"prompt_token_ids": [*b"ok<a>"], "multi_modal_data": {"audio": "f"}}
    assert built(make_builder("First"), prompt).prompt_token_ids == [*b"okf"]


@pytest.mark.parametrize("text", [b"^xy", b"xy"])
def test_a_token_before_the_items(make_builder: MakeBuilder, text: bytes) -> None:
    """It is there once, for all of them."""
    items = {"image": ["ab", "cd"]}
    request = built(
        make_builder("Beginning"), {"prompt_token_ids": [*text], "multi_modal_data": items}
    )
    assert request.prompt_token_ids == [*b"^abcdxy"]
    assert [item.places for item in request.media] == [((1, 2),), ((3, 2),)]


def test_texts_are_padded(make_builder: MakeBuilder) -> None:
    """Prompts with items are not."""
    builder = make_builder("Padding")
    assert built(builder, "abc").prompt_token_ids == [BOS, *b"abc", *[7] * 6]
    assert built(builder, data("x<i>", "ab")).prompt_token_ids == [BOS, *b"xab"]
    assert built(make_builder(), "abc").prompt_token_ids == [BOS, *b"abc"]
    with pytest.raises(PluginError, match="multimodal_processor:Padding"):
        built(builder, {"prompt_token_ids": [1, 0]})


@pytest.mark.parametrize("limit", [10, 11])
def test_padding_must_fit(make_builder: MakeBuilder, limit: int) -> None:
    """With a token of output."""
    builder = make_builder("Padding")
    builder.plan = replace(builder.plan, max_model_len=limit)
    if limit > 10:
        assert len(built(builder, "a", max_tokens=1).prompt_token_ids) == 10
        return
    with pytest.raises(RequestError, match="10 tokens, with its padding, but max_model_len is 10"):
        built(builder, "a", max_tokens=1)


def test_token_ids_may_have_placeholders(make_builder: MakeBuilder) -> None:
    prompt = {"prompt_token_ids": list(b"1<i>2"), "multi_modal_data": {"image": "abc"}}
    assert built(make_builder(), prompt).prompt_token_ids == list(b"1abc2")


@given(st.lists(st.sampled_from(["<i>", "<a>", "q", "<", "i", "<i"]), max_size=12))
def test_random_prompts(pieces: list[str]) -> None:
    """Hypothesis needs no new registry for each example."""
    text = "".join(pieces)
    counts = {"image": text.count("<i>"), "audio": text.count("<a>")}
    items = {name: [f"{name}{i}" for i in range(count)] for name, count in counts.items()}
    waiting = {name: iter(values) for name, values in items.items()}
    expected = ""
    place = 0
    while place < len(text):
        modality = {"<i>": "image", "<a>": "audio"}.get(text[place : place + 3])
        expected += text[place] if modality is None else next(waiting[modality])
        place += 1 if modality is None else 3
    request = built(RANDOM[0], {"prompt": text or "z", "multi_modal_data": items})
    assert bytes(request.prompt_token_ids[1:]).decode() == (expected or "z")


RANDOM: list[RequestBuilder] = []


@pytest.fixture(autouse=True)
def shared_builder(make_builder: MakeBuilder) -> None:
    RANDOM[:] = [make_builder()]


def test_an_item_is_processed_once(make_builder: MakeBuilder) -> None:
    builder = make_builder()
    processor = builder._media._processor  # type: ignore[union-attr]
    first = built(builder, data("<i><i>", ["ab", "ab"]))
    again = built(builder, data("q<i>", "ab"))
    assert processor.calls == [("image", "ab", {})]
    assert {item.digest for item in (*first.media, *again.media)} == {first.media[0].digest}
    other = built(builder, {**data("<i>", "ab"), "mm_processor_kwargs": {"size": 3}})
    sound = built(builder, data("<a>", audio="ab"))
    assert processor.calls[1:] == [("image", "ab", {"size": 3}), ("audio", "ab", {})]
    digests = [one.media[0].digest for one in (first, other, sound)]
    assert len(set(digests)) == 3, "options and modality are part of what an item is"


def test_the_engine_options_are_the_default(make_builder: MakeBuilder) -> None:
    builder = make_builder(mm_processor_kwargs={"size": 2, "crop": 1})
    built(builder, {**data("<i>", "ab"), "mm_processor_kwargs": {"size": 3}})
    processor = builder._media._processor  # type: ignore[union-attr]
    assert processor.calls == [("image", "ab", {"size": 3, "crop": 1})]


def test_a_name_stands_for_an_item_that_is_kept(make_builder: MakeBuilder) -> None:
    builder = make_builder()
    reader = builder._media.items._reader  # type: ignore[union-attr]
    named = {**data("<i>", ["ab"]), "multi_modal_uuids": {"image": ["cat"]}}
    first = built(builder, named)
    later = {"prompt": "<i>", "multi_modal_data": {"image": [None]}}
    again = built(builder, {**later, "multi_modal_uuids": {"image": ["cat"]}})
    assert again.media[0].digest == first.media[0].digest and reader.read_values == ["ab"]
    assert [one.media[0].was_kept for one in (first, again)] == [False, True]
    with pytest.raises(RequestError, match="no item 'dog' in the cache; send it"):
        built(builder, {**later, "multi_modal_uuids": {"image": ["dog"]}})
    with pytest.raises(RequestError, match="2 names for 1 items"):
        built(builder, {**named, "multi_modal_uuids": {"image": ["a", "b"]}})


def test_one_name_for_items_of_different_sizes(make_builder: MakeBuilder) -> None:
    """The engine takes them for different items, because it has made other rows of the first."""
    builder = make_builder(mm_processor_cache_gb=0)
    first, second = (
        built(builder, {**data("<i>", [value]), "multi_modal_uuids": {"image": ["cat"]}}).media[0]
        for value in ("ab", "abcd")
    )
    assert first.digest != second.digest


def test_the_reader_gets_the_settings(make_builder: MakeBuilder) -> None:
    builder = make_builder(
        allowed_media_domains=["example.com"],
        allowed_local_media_path="/pictures",
        media_io_kwargs={"video": {"num_frames": 3}},
    )
    assert builder._media.items._reader.setup == MediaReaderSetup(  # type: ignore[union-attr]
        domains=("example.com",),
        local_path="/pictures",
        options={"video": {"num_frames": 3}},
    )


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"img": 2}, "has 'img'; expected image, audio, video"),
        ({"image": "two"}, "gives 'two' for image"),
        ({"image": -1}, "from 0 on"),
        ({"image": {"count": 1.5}}, "expected a number of items"),
    ],
)
def test_wrong_limits(make_builder: MakeBuilder, limits: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_builder(limit_mm_per_prompt=limits)


def test_the_cache_can_be_emptied(make_builder: MakeBuilder) -> None:
    builder = make_builder()
    processor = builder._media._processor  # type: ignore[union-attr]
    for _ in range(2):
        built(builder, data("<i>", "ab"))
        builder.reset_mm_cache()
    assert len(processor.calls) == 2


def test_the_cache_has_a_size(make_builder: MakeBuilder) -> None:
    builder = make_builder(mm_processor_cache_gb=100 / 2**30)  # 25 letters
    processor = builder._media._processor  # type: ignore[union-attr]
    values = ["a" * 10, "b" * 10, "c" * 10]
    for value in (*values, values[1], values[0], "d" * 99, "d" * 99):
        built(builder, data("<i>", value))
    processed = [value[0] for _, value, _ in processor.calls]
    assert processed == ["a", "b", "c", "a", "d", "d"]


@pytest.mark.parametrize(
    ("prompt", "settings", "told"),
    [
        (data("<i><i>", "a"), {}, "more placeholders '<i>' than items of type image, of which"),
        (data("<i>", ["a", "b"]), {}, "fewer placeholders '<i>' than items of type image"),
        (data("<v>", video="a"), {}, "takes text, image, audio only, got an item of type video"),
        (
            data("<i><i>", ["a", "b"]),
            {"limit_mm_per_prompt": {"image": 1}},
            "2 items of type image; at most 1 may be in one",
        ),
        (
            data("<i>", "a"),
            {"limit_mm_per_prompt": {"image": {"count": 0}}},
            "takes text, audio only",
        ),
        (data("<i>", "a" * 99), {"max_model_len": 40}, "100 tokens, with those of its media"),
        ({"prompt": "<i>", "multi_modal_data": ["a"]}, {}, "must be a mapping, got list"),
    ],
)
def test_wrong_prompts(
    make_builder: MakeBuilder, prompt: Any, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        built(make_builder(**settings), prompt)


def test_the_processor_may_refuse_an_item(make_builder: MakeBuilder) -> None:
    with pytest.raises(RequestError, match="image\\[1\\]: it is red") as refused:
        built(make_builder(), data("<i><i>", ["a", "red"]))
    assert refused.value.parameter == "multi_modal_data.image[1]"


@pytest.mark.parametrize("value", ["bug", "..", "none"])
def test_a_processor_that_fails_is_named(make_builder: MakeBuilder, value: str) -> None:
    """It raises, returns an item without rows, or something else."""
    builder = make_builder()
    with pytest.raises(PluginError, match=r"acme-media|Processor\.process"):
        built(builder, data("<i>", value))
    assert built(builder, data("<i>", "ab")).media


def test_names_of_different_salts_are_different(make_builder: MakeBuilder) -> None:
    """So nobody can replace what others call by the same name."""
    builder = make_builder()
    named = {**data("<i>", ["ab"]), "multi_modal_uuids": {"image": ["cat"]}}
    first = built(builder, {**named, "cache_salt": "one"})
    later = data("<i>", ["cd"]) | {"multi_modal_uuids": {"image": ["cat"]}, "cache_salt": "two"}
    assert built(builder, later).prompt_token_ids != first.prompt_token_ids


@pytest.mark.parametrize("name", ["Echo", "First"])
def test_beams_write_no_placeholders(make_builder: MakeBuilder, name: str) -> None:
    builder = make_builder(name)
    prompt = as_prompt(data("<i> x" if name == "Echo" else "x", "ab"))
    first = builder.build(prompt, SamplingParams(), "r")
    written = tuple(b"<i>!?<i>")
    beam = [*first.prompt_token_ids, *written]
    again = longer(prompt, beam, len(first.prompt_token_ids))
    request = builder.build(again, SamplingParams(), "r")
    assert request.prompt_token_ids == beam
    assert request.media == tuple(
        msgspec.structs.replace(item, was_kept=True) for item in first.media
    )
    sizes = first.token_inputs["sizes"]
    assert request.token_inputs == {"sizes": [*sizes, *[0] * len(written)]}


def test_options_that_depend_on_how_many_items_there_are(make_builder: MakeBuilder) -> None:
    builder = make_builder("Counted")
    cases = [
        (data("<i>", ["ab"]), b"ab"),
        (data("<i><i>", ["ab", "cd"]), b"ac"),
        (data("<i>", ["ab"]), b"ab"),
        ({**data("<i><i>", ["ab", "cd"]), "mm_processor_kwargs": {"most": 2}}, b"abcd"),
    ]
    for prompt, expected in cases:
        assert built(builder, prompt).prompt_token_ids == [BOS, *expected]


def test_numbers_that_messages_cannot_hold(make_builder: MakeBuilder) -> None:
    with pytest.raises(RequestError, match="a number that 64 bits cannot hold") as refused:
        built(make_builder(), "x", extra_args={"kv_transfer_params": {"a": 10**30}})
    assert refused.value.parameter == "extra_args"


def test_vectors_of_items(make_builder: MakeBuilder) -> None:
    prompt = as_prompt(data("<i>", "ab"))
    builder = make_builder()
    pooling = Pooling(task="embed")
    builder.plan = replace(builder.plan, pooling=pooling)
    request = builder.build(prompt, PoolingParams(), "r")
    assert [item.places for item in request.media] == [((1, 2),)]
    assert request.token_inputs == {"sizes": [0, 2, 2]}


def test_truncation_would_cut_items(make_builder: MakeBuilder) -> None:
    with pytest.raises(RequestError, match="cannot be truncated"):
        built(make_builder(), data("<i>", "a"), truncate_prompt_tokens=3)


def test_a_model_of_text() -> None:
    builder = RequestBuilder(echo_plan(), ByteTokenizer())
    assert builder.placeholders == {}
    prompt = Prompt(text="x", media=[MediaSource(modality="image", value="a", path="here")])
    with pytest.raises(RequestError, match="here: this model takes text only") as refused:
        builder.build(prompt, SamplingParams(), "r")
    assert refused.value.parameter == "here"


# --- messages -------------------------------------------------------------------------------------


def test_media_are_taken_out_of_messages() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}, "uuid": "u"}
    sound = {"type": "input_audio", "input_audio": {"data": "AAA=", "format": "mp3"}}
    text = {"type": "text", "text": "What is this?"}
    messages = [
        {"role": "system", "content": "plain"},
        {"role": "user", "content": [image, text, sound]},
    ]
    known = {"type": "image_url", "image_url": None, "uuid": "k"}
    messages.append({"role": "user", "content": [known]})
    taken, sources = take_media(messages, {"image": "<i>", "audio": "<a>"})
    assert taken[0] is messages[0]
    assert taken[1]["content"] == [
        {"type": "image", "placeholder": "<i>"},
        text,
        {"type": "audio", "placeholder": "<a>"},
    ]
    path = "messages[1].content"
    assert sources == [
        MediaSource(modality="image", value="data:x", uuid="u", path=f"{path}[0]"),
        MediaSource(modality="audio", value="data:audio/mp3;base64,AAA=", path=f"{path}[2]"),
        MediaSource(modality="image", value=None, uuid="k", path="messages[2].content[0]"),
    ]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image_url", "image_url": {}}, "image_url must be {'url': …}, got {}"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url must be"),
        ({"type": "image_url", "image_url": {"url": "x"}, "uuid": 3}, "uuid must be a string"),
        ({"type": "input_audio", "input_audio": "x"}, "input_audio must be {'data': base64"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "takes text, image, audio only"),
    ],
)
def test_wrong_parts_of_messages(part: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told) as refused:
        take_media([{"role": "user", "content": ["x", part]}], {"image": "<i>", "audio": "<a>"})
    assert refused.value.parameter == "messages[0].content[1]"


def test_hashes_of_blocks_tell_items_apart() -> None:
    from pegboard.engine.kv.hashes import hash_spans
    from pegboard.engine.requests import Request

    item = MediaItem("image", "d", ((3, 2), (6, 4)), {})
    source = EngineRequest(
        request_id="r", prompt_token_ids=[0] * 12, params=SamplingParams(), media=(item,)
    )
    spans = hash_spans(Request.of(source), 4)
    assert [(span.start, span.stop) for span in spans] == [(3, 4), (4, 5), (6, 8), (8, 10)]
    assert len({span.key for span in spans}) == 4


def test_the_adapter_of_a_modality(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt with several modalities that have one gets none, with a warning."""
    adapters = {"audio": "sounds", "image": "pictures"}

    def chosen(*modalities: str) -> str | None:
        media = tuple(MediaSource(modality=modality, value="x") for modality in modalities)
        adapter = adapter_of(Prompt(text="a", media=media), adapters)
        return None if adapter is None else adapter.lora_path

    assert (chosen(), chosen("video"), chosen("audio", "audio")) == (None, None, "sounds")
    assert chosen("video", "image") == "pictures" and not caplog.records
    assert chosen("image", "audio") is None
    assert "adapters for audio and image" in caplog.text
