"""Beam search with an engine that knows nothing about it. Every round extends every beam by one
token. The rules are vLLM's.

The score of a beam is cumulative logprob / length ** length_penalty. The length includes the prompt
but not a final end-of-sequence token. Each round asks for 2 * beam_width logprobs, so
`max_logprobs` must allow that many.

`BeamSearch` chooses the beams. `LLM.beam_search` runs it offline, and `beam_search_online` with an
`EngineClient`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from pegboard.data.output import CompletionOutput, Logprob, RequestOutput
from pegboard.data.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from pegboard.errors import PegboardError, RequestError
from pegboard.interfaces.api import EngineClient, Prompt, RequestOptions


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. tokens: the token ids of prompt and output. text: the decoded `tokens`. logprobs:
    one entry per output token."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def score(beam: BeamSearchSequence, length_penalty: float, eos_token_ids: Collection[int]) -> float:
    """Return the logprob of a beam, normalized by length. Higher is better."""
    length = len(beam.tokens)
    if beam.tokens[-1] in eos_token_ids:
        length -= 1
    return beam.cum_logprob / float(max(1, length) ** length_penalty)


class BeamSearch:
    """The search of one prompt. beams: the beams to extend by one token each; empty when the search
    is over."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        max_model_len: int,
    ) -> None:
        self.beams = [BeamSearchSequence(list(prompt_token_ids), [])]
        self._params = params
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._completed: list[BeamSearchSequence] = []
        self._num_rounds_left = params.max_tokens

    def extend(self, logprobs: Sequence[Mapping[int, Logprob]]) -> None:
        """Apply the results of one round. logprobs: the most likely next tokens of every beam, in
        the order of `beams`."""
        longer = [
            BeamSearchSequence(
                [*beam.tokens, token],
                [*beam.logprobs, dict(candidates)],
                beam.cum_logprob + entry.logprob,
            )
            for beam, candidates in zip(self.beams, logprobs, strict=True)
            for token, entry in candidates.items()
        ]
        going_on = []
        for beam in longer:
            if not self._params.ignore_eos and beam.tokens[-1] in self._eos_token_ids:
                beam.finish_reason = "stop"
                self._completed.append(beam)
            else:
                going_on.append(beam)
        best = sorted(going_on, key=self._rank, reverse=True)[: self._params.beam_width]
        self._num_rounds_left -= 1
        # all beams of a search have the same length, so they reach the limit together
        is_over = self._num_rounds_left == 0 or bool(
            best and len(best[0].tokens) >= self._max_model_len
        )
        self._completed += best if is_over else []
        self.beams = [] if is_over else best

    def best(self) -> list[BeamSearchSequence]:
        """Return the `beam_width` best beams, best first. A beam without end of sequence has the
        finish reason "length"."""
        best = sorted(self._completed, key=self._rank, reverse=True)[: self._params.beam_width]
        for beam in best:
            beam.finish_reason = beam.finish_reason or "length"
        return best

    def shown(self, beam: BeamSearchSequence) -> list[int]:
        """Return the tokens to show, without the end of sequence unless the request wants it."""
        hides_end = beam.finish_reason == "stop" and not self._params.include_stop_str_in_output
        return beam.tokens[:-1] if hides_end else beam.tokens

    def _rank(self, beam: BeamSearchSequence) -> float:
        return score(beam, self._params.length_penalty, self._eos_token_ids)


def step_params(params: BeamSearchParams) -> SamplingParams:
    """Return the sampling parameters of one round. Raises RequestError unless `params` are
    BeamSearchParams."""
    if not isinstance(params, BeamSearchParams):
        raise RequestError(
            f"params must be BeamSearchParams, got {type(params).__name__}", parameter="params"
        )
    return SamplingParams(
        max_tokens=1,
        logprobs=2 * params.beam_width,
        temperature=params.temperature,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def check_beam_prompt(prompt: Prompt) -> None:
    """Raise RequestError for a prompt that beams cannot be appended to."""
    if prompt.embeds:
        raise RequestError(
            "prompt_embeds: beam search needs text or token ids", parameter="prompt_embeds"
        )


def named(prompt: Prompt) -> Prompt:
    """Return the prompt of a search, whose items have names that nobody else knows. So they are
    fetched and read once, and not in each round, unless the cache of processed items is off."""
    media = [
        source if source.uuid is not None else replace(source, uuid=secrets.token_hex())
        for source in prompt.media
    ]
    return replace(prompt, media=media)


def longer(prompt: Prompt, tokens: Sequence[int], num_prompt_tokens: int) -> Prompt:
    """Return the prompt of a beam's next round. tokens: of the beam. num_prompt_tokens: how many of
    them the prompt has, with those of its items."""
    if prompt.media:
        return replace(prompt, continuation=tokens[num_prompt_tokens:])
    return replace(prompt, text=None, token_ids=tokens)


async def beam_search_online(
    client: EngineClient,
    prompt: Prompt,
    params: BeamSearchParams,
    request: RequestOptions,
    eos_token_ids: Collection[int],
) -> AsyncIterator[RequestOutput]:
    """Stream one final output with the `beam_width` best completions. Their `text` and `token_ids`
    do not include the prompt. All beams of a round run at once. Raises what `EngineClient.generate`
    raises. Closing the iterator aborts the request."""
    params_of_step = step_params(params)
    check_beam_prompt(prompt)
    prompt = named(prompt)
    try:
        first = await _last(client.generate(prompt, params_of_step, request))
    except RequestError as error:
        if error.parameter != "logprobs":
            raise
        count = params_of_step.logprobs
        reason = f"{params.beam_width} beams need {count} logprobs in every round: {error}"
        raise RequestError(reason, parameter="n") from error
    prompt_token_ids = list(first.prompt_token_ids or ())
    search = BeamSearch(prompt_token_ids, params, eos_token_ids, client.models()[0].max_model_len)
    search.extend([last_logprobs(first)])
    number = 0
    while search.beams:
        number += 1
        count = len(prompt_token_ids)
        prompts = [longer(prompt, beam.tokens, count) for beam in search.beams]
        names = [
            replace(request, request_id=f"{request.request_id}-{number}-{index}")
            for index in range(len(prompts))
        ]
        rounds = [
            _last(client.generate(one, params_of_step, name))
            for one, name in zip(prompts, names, strict=True)
        ]
        search.extend([last_logprobs(output) for output in await _all(rounds)])
    completions = []
    for index, beam in enumerate(search.best()):
        token_ids = search.shown(beam)[len(prompt_token_ids) :]
        text = client.tokenizer().decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        logprobs = beam.logprobs[: len(token_ids)]
        stop = beam.stop_reason
        completions.append(
            CompletionOutput(
                index, text, token_ids, beam.cum_logprob, logprobs, beam.finish_reason, stop
            )
        )
    yield RequestOutput(request.request_id, prompt.text, prompt_token_ids, completions, True)


async def _last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async with aclosing(outputs) as stream:  # type: ignore[type-var]
        async for output in stream:
            if output.finished:
                return output
    raise PegboardError("the engine ended a beam without an output")


async def _all(rounds: Sequence[Any]) -> list[RequestOutput]:
    """Run all and return their results in order. The first failure, or a cancellation, also ends
    the others."""
    tasks = [asyncio.ensure_future(one) for one in rounds]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def last_logprobs(output: RequestOutput) -> Mapping[int, Logprob]:
    completion = output.outputs[0]
    if completion.finish_reason in ("error", "abort"):
        raise PegboardError(f"beam search was ended by the engine ({completion.finish_reason})")
    return (completion.logprobs or [{}])[0]
