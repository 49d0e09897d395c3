"""Text, stop strings and logprobs of outputs do not depend on how tokens are grouped into deltas,
and agree with a search over the whole text."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.data.logprobs import FlatLogprobs, TokenTexts
from pegboard.data.request import EngineRequest, PositionLogprobs, RequestDelta
from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.front.output_stream import OutputStream
from pegboard_testing.fake_client import ByteTokenizer

TOKENIZER = ByteTokenizer()


def open_stream(params: SamplingParams, **more) -> OutputStream:
    request = EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=params)
    return OutputStream(request, TOKENIZER, TokenTexts(TOKENIZER), **more)


def chunks_of(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % (len(token_ids) + 1) for cut in cuts}), len(token_ids)]
    return [token_ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def run(
    params: SamplingParams, chunks: list[list[int]], reason: str = "length", take_every: int = 1
):
    """Feed the chunks and take an output after every `take_every`-th. Return the outputs, and what
    each `feed` returned."""
    stream = open_stream(params)
    outputs = []
    hits = []
    for number, chunk in enumerate(chunks):
        last = number == len(chunks) - 1
        logprobs = (
            None
            if params.logprobs is None
            else [PositionLogprobs([token], [-float(token)], 1) for token in chunk]
        )
        delta = RequestDelta(
            request_id="r",
            token_ids=chunk,
            logprobs=logprobs,
            finish_reason=reason if last else None,
        )
        hits.append(stream.feed(delta))
        if (number % take_every == 0 or last) and (output := stream.take()):
            outputs.append(output)
    return outputs, hits


def oracle(token_ids: list[int], params: SamplingParams) -> tuple[str, str | None, int]:
    """Search the whole text after each token. Return (text, the stop string that was found, number
    of tokens kept)."""
    pushed = 0
    stream = TOKENIZER.stream((), skip_special_tokens=True)
    text = ""
    for count, token in enumerate(token_ids, 1):
        pushed = len(text)
        text += stream.push([token])
        if count == len(token_ids):
            text += stream.flush()
        if count <= params.min_tokens or len(text) == pushed:
            continue
        for stop in params.stop:
            # a match must end in the new text
            found = [
                at
                for at in range(len(text))
                if text.startswith(stop, at) and at + len(stop) > pushed
            ]
            if found:
                end = found[0] + len(stop) if params.include_stop_str_in_output else found[0]
                return text[:end], stop, count
    return text, None, len(token_ids)


letters = st.text("abé€", min_size=1, max_size=40)
stops = st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300, deadline=None)
@given(
    letters,
    stops,
    st.lists(st.integers(0, 200), max_size=12),
    st.integers(0, 6),
    st.booleans(),
    st.integers(1, 4),
)
def test_any_chunking_gives_the_oracles_text(text, stop, cuts, min_tokens, include, take_every):
    token_ids = list(text.encode())
    expected = None
    for kind in RequestOutputKind:
        params = SamplingParams(
            stop=stop,
            min_tokens=min_tokens,
            max_tokens=200,
            include_stop_str_in_output=include,
            output_kind=kind,
            logprobs=0,
        )
        outputs, hits = run(params, chunks_of(token_ids, cuts), take_every=take_every)
        expected = oracle(token_ids, params)
        parts = [output.outputs[0] for output in outputs]
        assert outputs[-1].finished and not any(output.finished for output in outputs[:-1])
        if kind is RequestOutputKind.DELTA:
            assert "".join(part.text for part in parts) == expected[0]
            assert sum((part.token_ids for part in parts), []) == token_ids[: expected[2]]
            assert sum((part.logprobs for part in parts), []) == [
                {token: part_of(token)} for token in token_ids[: expected[2]]
            ]
        else:
            assert parts[-1].text == expected[0]
            assert parts[-1].token_ids == token_ids[: expected[2]]
            assert len(parts[-1].logprobs) == expected[2]
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        if kind is RequestOutputKind.CUMULATIVE:
            for earlier, later in zip(parts, parts[1:], strict=False):
                assert later.text.startswith(earlier.text)
        assert parts[-1].cumulative_logprob == -float(sum(token_ids[: expected[2]]))
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (
            ("stop", expected[1]) if expected[1] else ("length", None)
        )
        assert sum(hits) <= 1


def part_of(token: int):
    from pegboard.data.output import Logprob

    return Logprob(-float(token), 1, TOKENIZER.decode([token], skip_special_tokens=False))


def test_a_stop_string_asks_for_one_abort_and_later_deltas_are_ignored():
    stream = open_stream(SamplingParams(stop=["b"], max_tokens=10))
    assert stream.feed(RequestDelta(request_id="r", token_ids=list(b"abc")))
    assert not stream.feed(RequestDelta(request_id="r", token_ids=list(b"d")))
    assert not stream.feed(RequestDelta(request_id="r", finish_reason="abort"))
    output = stream.take()
    assert output.finished
    assert output.outputs[0].text == "a"
    assert output.outputs[0].token_ids == list(b"ab")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "b")


def test_first_stop_in_list_order_wins():
    (output,), _ = run(
        SamplingParams(stop=["yz", "z"], max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY),
        [list(b"xyz")],
    )
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("x", "yz")


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_the_stop_tokens_text_is_left_out_unless_wanted(include, text):
    params = SamplingParams(
        stop_token_ids=[ord("c")], include_stop_str_in_output=include, max_tokens=9
    )
    stream = open_stream(params)
    assert not stream.feed(
        RequestDelta(
            request_id="r", token_ids=list(b"abc"), finish_reason="stop", stop_reason=ord("c")
        )
    )
    completion = stream.take().outputs[0]
    assert (completion.text, completion.token_ids, completion.stop_reason) == (
        text,
        list(b"abc"),
        ord("c"),
    )


def test_text_that_may_become_a_stop_string_is_held_back():
    params = SamplingParams(stop=["STOP"], output_kind=RequestOutputKind.DELTA, max_tokens=50)
    outputs, _ = run(params, [[byte] for byte in b"wait STOx go"])
    texts = [output.outputs[0].text for output in outputs]
    assert "".join(texts) == "wait STOx go"
    assert texts[:4] == ["", "", "", "w"]


def test_n_completions_end_one_by_one():
    stream = open_stream(SamplingParams(n=2, max_tokens=9, output_kind=RequestOutputKind.DELTA))
    stream.feed(RequestDelta(request_id="r", index=1, token_ids=[97]))
    assert [(c.index, c.text) for c in stream.take().outputs] == [(1, "a")]
    stream.feed(RequestDelta(request_id="r", index=1, token_ids=[98], finish_reason="length"))
    stream.feed(RequestDelta(request_id="r", index=0, token_ids=[99]))
    output = stream.take()
    assert not output.finished
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [
        (0, "c", None),
        (1, "b", "length"),
    ]
    assert stream.take() is None
    stream.feed(RequestDelta(request_id="r", index=0, finish_reason="abort"))
    output = stream.take()
    assert output.finished and [c.finish_reason for c in output.outputs] == ["abort"]
    assert stream.key(1) == "1_r"


def test_without_detokenization_there_are_only_ids():
    stream = open_stream(SamplingParams(detokenize=False, logprobs=0, max_tokens=9))
    logprobs = [PositionLogprobs([97], [-1.0], 3)]
    stream.feed(
        RequestDelta(request_id="r", token_ids=[97], logprobs=logprobs, finish_reason="length")
    )
    completion = stream.take().outputs[0]
    assert (completion.text, completion.token_ids) == ("", [97])
    assert completion.logprobs[0][97].decoded_token is None
    assert completion.logprobs[0][97].rank == 3


@pytest.mark.parametrize("flat", [False, True])
def test_logprobs_and_prompt_logprobs(flat):
    params = SamplingParams(
        logprobs=2,
        prompt_logprobs=1,
        flat_logprobs=flat,
        max_tokens=9,
        output_kind=RequestOutputKind.DELTA,
    )
    stream = open_stream(params)
    prompt = [PositionLogprobs([2, 5], [-2.0, -0.1], 9), PositionLogprobs([3, 3], [-0.2, -0.2], 1)]
    stream.feed(
        RequestDelta(request_id="r", prompt_logprobs=msgspec.Raw(msgspec.msgpack.encode(prompt)))
    )
    assert stream.take() is None
    rows = [PositionLogprobs([98, 97, 99], [-3.0, -0.5, -0.7], 7)]
    stream.feed(RequestDelta(request_id="r", token_ids=[98], logprobs=rows))
    output = stream.take()
    assert len(output.prompt_logprobs) == 3
    assert not output.prompt_logprobs[0]
    assert [list(row) for row in output.prompt_logprobs[1:]] == [[2, 5], [3]]
    assert output.prompt_logprobs[2][3].rank == 1
    (row,) = output.outputs[0].logprobs
    assert {
        token: (entry.logprob, entry.rank, entry.decoded_token) for token, entry in row.items()
    } == {
        98: (-3.0, 7, "b"),
        97: (-0.5, 1, "a"),
        99: (-0.7, 2, "c"),
    }
    assert isinstance(output.outputs[0].logprobs, FlatLogprobs) is flat
    stream.feed(RequestDelta(request_id="r", token_ids=[97], logprobs=rows, finish_reason="length"))
    assert stream.take().prompt_logprobs is None


def test_stream_interval_gathers_tokens():
    stream = open_stream(
        SamplingParams(max_tokens=99, output_kind=RequestOutputKind.DELTA), stream_interval=3
    )
    sizes = []
    for number in range(8):
        stream.feed(
            RequestDelta(
                request_id="r", token_ids=[97], finish_reason="length" if number == 7 else None
            )
        )
        if output := stream.take():
            sizes.append(len(output.outputs[0].token_ids))
    assert sizes == [1, 3, 3, 1]


class SpacedTokenizer(ByteTokenizer):
    """Decodes every special token with a space before it."""

    def stream(self, prompt_token_ids, *, skip_special_tokens):
        stream = super().stream(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        push = stream.push
        stream.push = lambda ids: "".join(" " * (token >= 256) + push([token]) for token in ids)
        return stream

    def decode(self, token_ids, *, skip_special_tokens):
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).removeprefix(" ")


@pytest.mark.parametrize(
    ("spaces", "text"), [(True, "a <s> </s>b </s>"), (False, "a <s></s>b </s>")]
)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_no_space_between_special_tokens_when_it_is_not_wanted(spaces, text, cut):
    params = SamplingParams(
        skip_special_tokens=False,
        spaces_between_special_tokens=spaces,
        include_stop_str_in_output=True,
    )
    request = EngineRequest(request_id="r", prompt_token_ids=[1], params=params)
    stream = OutputStream(request, SpacedTokenizer())
    tokens = [97, 256, 257, 98, 257]
    stream.feed(RequestDelta(request_id="r", token_ids=tokens[:cut]))
    stream.feed(RequestDelta(request_id="r", token_ids=tokens[cut:], finish_reason="length"))
    assert stream.take().outputs[0].text == text


@given(
    text=st.text(alphabet="aé語🌍", max_size=6),
    cut=st.integers(0, 24),
    stop=st.sampled_from([None, ["zz"]]),
)
def test_text_that_is_cut_inside_a_character_ends_before_it(text, cut, stop):
    """As in vLLM."""
    ids = list(text.encode())[:cut] or [97]
    params = SamplingParams(stop=stop, max_tokens=99, output_kind=RequestOutputKind.DELTA)
    outputs, _ = run(params, [[token] for token in ids])
    shown = "".join(completion.text for output in outputs for completion in output.outputs)
    assert shown == bytes(ids).decode(errors="ignore")
