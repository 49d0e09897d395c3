"""Beam search: a wide enough beam finds the same as an exhaustive search; online, the search ends
when its requests end."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.data.output import Logprob
from pegboard.data.sampling_params import BeamSearchParams
from pegboard.errors import EngineDeadError, RequestError
from pegboard.front.beam_search import BeamSearch, beam_search_online
from pegboard.interfaces.api import Prompt, RequestOptions
from pegboard_testing.fake_client import EOS, FakeEngineClient

TOKENS = (1, 2, 3)
END = 3
"""Three tokens, of which the last one ends a sequence."""


def logprobs_behind(seed: int, tokens: tuple[int, ...]) -> dict[int, Logprob]:
    chance = random.Random(f"{seed}{tokens}")
    return {token: Logprob(-chance.random() * 3) for token in TOKENS}


def exhaustive(
    seed: int, length: int, penalty: float, *, ignore_eos: bool
) -> list[tuple[tuple[int, ...], float]]:
    """Return all continuations of the prompt (9,) of up to `length` tokens, best first."""
    found = []
    for size in range(1, length + 1):
        for tokens in itertools.product(TOKENS, repeat=size):
            ends = tokens[-1] == END
            if END in tokens[:-1] and not ignore_eos or size < length and (not ends or ignore_eos):
                continue
            total = sum(
                logprobs_behind(seed, (9, *tokens[:at]))[token].logprob
                for at, token in enumerate(tokens)
            )
            found.append((tokens, total / (1 + size - ends) ** penalty))
    return sorted(found, key=lambda item: -item[1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 1.0, 2.0]), st.booleans())
def test_a_wide_beam_finds_the_best_of_all(seed, length, penalty, ignore_eos):
    params = BeamSearchParams(
        beam_width=3**length, max_tokens=length, length_penalty=penalty, ignore_eos=ignore_eos
    )
    search = BeamSearch([9], params, {END}, max_model_len=100)
    while search.beams:
        search.extend([logprobs_behind(seed, tuple(beam.tokens)) for beam in search.beams])
    expected = exhaustive(seed, length, penalty, ignore_eos=ignore_eos)
    best = search.best()
    assert [tuple(beam.tokens[1:]) for beam in best] == [
        tokens for tokens, _ in expected[: len(best)]
    ]
    assert len(best) == min(len(expected), params.beam_width)
    for beam in best:
        ended = not ignore_eos and beam.tokens[-1] == END
        assert (
            beam.finish_reason == ("stop" if ended else "length")
            and len(beam.logprobs) == len(beam.tokens) - 1
        )
        assert search.shown(beam) == (beam.tokens[:-1] if ended else beam.tokens)


def test_beams_end_at_the_length_of_the_model():
    search = BeamSearch(
        [9, 9],
        BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True),
        {END},
        max_model_len=5,
    )
    num_rounds = 0
    while search.beams:
        search.extend([logprobs_behind(0, tuple(beam.tokens)) for beam in search.beams])
        num_rounds += 1
    assert num_rounds == 3 and [len(beam.tokens) for beam in search.best()] == [5, 5]


def online(client: FakeEngineClient, **params):
    prompt = Prompt(text="x", add_special_tokens=False)
    return beam_search_online(
        client, prompt, BeamSearchParams(**params), RequestOptions(request_id="b"), (EOS,)
    )


def test_online_gives_one_final_output():
    async def main():
        return [
            output async for output in online(FakeEngineClient("abc"), beam_width=2, max_tokens=3)
        ]

    (output,) = asyncio.run(main())
    assert output.finished and output.prompt_token_ids == [ord("x")] and len(output.outputs) == 2
    best, other = output.outputs
    assert (
        best.cumulative_logprob >= other.cumulative_logprob
        and len(best.token_ids) == len(best.logprobs) == 3
    )


def test_leaving_ends_all_beams():
    client = FakeEngineClient("abc", delay_s=0.01)

    async def main():
        outputs = online(client, beam_width=3, max_tokens=100)
        task = asyncio.ensure_future(anext(outputs))
        while len(client.running) < 3:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await outputs.aclose()

    asyncio.run(main())
    assert not client.running and client.aborted


@pytest.mark.parametrize(
    ("client", "params", "error"),
    [
        (FakeEngineClient(), {"beam_width": 0, "max_tokens": 1}, RequestError),
        (FakeEngineClient(), {"beam_width": 11, "max_tokens": 1}, RequestError),
        (FakeEngineClient(fail_after=0), {"beam_width": 1, "max_tokens": 1}, EngineDeadError),
    ],
)
def test_errors_come_through(client, params, error):
    async def main():
        return [output async for output in online(client, **params)]

    with pytest.raises(error):
        asyncio.run(main())
    assert not client.running
