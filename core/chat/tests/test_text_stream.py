"""Incremental decoding gives the same as decoding at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pegboard_chat import ByteTextStream, OffsetTextStream

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


def _cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Return `ids` in chunks of the given sizes. The rest is one chunk."""
    chunks = []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    return [*chunks, ids]


def _stream(stream, chunks) -> list[str]:
    return [stream.push(chunk) for chunk in chunks] + [stream.flush()]


@given(
    tokens=st.lists(st.binary(max_size=5), max_size=20),
    sizes=st.lists(st.integers(0, 3), max_size=20),
    text=TEXTS,
)
def test_bytes_join_to_the_whole_text(tokens, sizes, text):
    """This also holds for bytes that are not UTF-8, and for characters cut into single bytes."""
    table = tokens + [bytes([byte]) for byte in text.encode()]
    parts = _stream(
        ByteTextStream(table, frozenset(), skip_special_tokens=True),
        _cut(list(range(len(table))), sizes),
    )
    assert "".join(parts) == b"".join(table).decode("utf-8", "replace")


@given(text=TEXTS)
def test_bytes_never_show_half_a_character(text):
    table = [bytes([byte]) for byte in range(256)]
    stream = ByteTextStream(table, frozenset(), skip_special_tokens=True)
    parts = [stream.push([byte]) for byte in text.encode()]
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)
    assert stream.flush() == ""


def test_special_tokens_are_text_or_nothing_and_unknown_ids_are_nothing():
    table = [b"a", b"<end>", "é".encode()[:1], "é".encode()[1:]]
    ids = [0, 2, 1, 3, 99, -1]
    assert "".join(_stream(ByteTextStream(table, frozenset({1}), True), [ids])) == "aé"
    assert (
        "".join(_stream(ByteTextStream(table, frozenset({1}), False), [ids]))
        == "a\ufffd<end>\ufffd"
    )


class WordDecoder:
    """A decoder that depends on neighbors, as SentencePiece's does: it joins words by spaces and
    drops the first space. Negative ids are single bytes of UTF-8. It counts the ids that it was
    given."""

    def __init__(self) -> None:
        self.words = ["▁a", "b", "▁", "▁word", "ü", "", "\u4e2d"]
        self.longest = 0

    def __call__(self, ids: list[int]) -> str:
        self.longest = max(self.longest, len(ids))
        data = b"".join(
            bytes([-i]) if i < 0 else self.words[i].replace("▁", " ").encode() for i in ids
        )
        return data.decode("utf-8", "replace").removeprefix(" ")


IDS = st.lists(
    st.integers(0, 6) | st.sampled_from("aß中😀").map(lambda c: [-b for b in c.encode()]),
    max_size=40,
).map(lambda items: [i for item in items for i in (item if isinstance(item, list) else [item])])


@given(prompt=IDS, output=IDS, sizes=st.lists(st.integers(0, 4), max_size=40))
def test_offsets_join_to_the_whole_text(prompt, output, sizes):
    decode = WordDecoder()
    expected = decode(prompt + output)[len(decode(prompt)) :]
    assert (
        "".join(_stream(OffsetTextStream(WordDecoder(), prompt), _cut(output, sizes))) == expected
    )


@given(ids=st.lists(st.integers(0, 6) | st.integers(-255, -128), min_size=1, max_size=300))
def test_offsets_do_bounded_work_per_push_even_on_garbage(ids):
    """The decoder gets at most 43 tokens, the longest context that is tried, 16 tokens that wait
    for more, and the new one."""
    decode = WordDecoder()
    stream = OffsetTextStream(decode, ids)
    for token_id in ids:
        stream.push([token_id])
    assert decode.longest <= 43 + 16 + 1


def test_offsets_complete_a_character_the_prompt_began():
    first, *rest = (-byte for byte in "中".encode())
    stream = OffsetTextStream(WordDecoder(), [0, first])
    assert [stream.push([i]) for i in rest] == ["", "中"]


def test_offsets_hold_back_at_most_a_few_tokens():
    stream = OffsetTextStream(WordDecoder(), [])
    parts = [stream.push([-255]) for _ in range(100)]
    assert len("".join(parts)) >= 80
    assert len("".join(parts) + stream.flush()) == 100
