"""Beam search over `LLM.generate`: one token per round for all beams of all prompts (vLLM's rules).

Score of a beam: cumulative logprob / length ** length_penalty, the length counting the prompt but not a final
end-of-sequence token. Each round asks for 2 * beam_width logprobs, so `max_logprobs` must allow that many.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pegboard.errors import RequestError
from pegboard.input import PromptInput
from pegboard.output import Logprob
from pegboard.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from pegboard.llm import LLM


@dataclass(slots=True)
class BeamSearchSequence:
    """tokens: prompt and output. text: the decoded `tokens`. logprobs: one entry per output token."""

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


@dataclass(slots=True)
class _Search:
    prompt_token_ids: list[int]
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)


def score(beam: BeamSearchSequence, length_penalty: float, eos_token_ids: Collection[int]) -> float:
    """Length-normalized logprob; higher is better."""
    length = len(beam.tokens)
    if beam.tokens[-1] in eos_token_ids:
        length -= 1
    return beam.cum_logprob / float(max(1, length) ** length_penalty)


def beam_search(
    llm: "LLM", prompts: Sequence[PromptInput], params: BeamSearchParams, *, use_tqdm: Any = False
) -> list[BeamSearchOutput]:
    """Search all prompts together. Raises RequestError as `LLM.generate`."""
    if params.beam_width < 1 or params.max_tokens < 1:
        raise RequestError("beam_width and max_tokens must be at least 1", parameter="beam_width")
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    step_params = SamplingParams(max_tokens=1, logprobs=2 * params.beam_width, temperature=params.temperature, ignore_eos=True)
    first = [engine.prepare(f"beam-{index}", prompt, step_params) for index, prompt in enumerate(prompts)]
    eos_token_ids = frozenset(engine.eos_token_ids)
    searches = [_Search(request.prompt_token_ids, [BeamSearchSequence(request.prompt_token_ids, [])]) for request in first]

    def rank(beam: BeamSearchSequence) -> float:
        return score(beam, params.length_penalty, eos_token_ids)

    for _ in range(params.max_tokens):
        for search in searches:
            search.completed += [beam for beam in search.beams if len(beam.tokens) >= engine.plan.max_model_len]
            search.beams = [beam for beam in search.beams if len(beam.tokens) < engine.plan.max_model_len]
        live = [(search, beam) for search in searches for beam in search.beams]
        if not live:
            break
        outputs = llm.generate([{"prompt_token_ids": beam.tokens} for _, beam in live], step_params, use_tqdm=use_tqdm)
        for search in searches:
            search.beams = []
        for (search, beam), output in zip(live, outputs, strict=True):
            _extend(search, beam, (output.outputs[0].logprobs or [{}])[0], eos_token_ids, params)
        for search in searches:
            search.beams = sorted(search.beams, key=rank, reverse=True)[: params.beam_width]
    results = []
    for search in searches:
        best = sorted([*search.completed, *search.beams], key=rank, reverse=True)[: params.beam_width]
        for beam in best:
            shown = beam.tokens
            if beam.finish_reason == "stop" and not params.include_stop_str_in_output:
                shown = shown[:-1]
            beam.text = tokenizer.decode(shown, skip_special_tokens=True)
            beam.finish_reason = beam.finish_reason or "length"
        results.append(BeamSearchOutput(best))
    return results


def _extend(
    search: _Search,
    beam: BeamSearchSequence,
    logprobs: dict[int, Logprob],
    eos_token_ids: frozenset[int],
    params: BeamSearchParams,
) -> None:
    """Add every continuation of `beam` to the search."""
    for token_id, entry in logprobs.items():
        longer = BeamSearchSequence([*beam.tokens, token_id], [*beam.logprobs, logprobs], beam.cum_logprob + entry.logprob)
        if token_id in eos_token_ids and not params.ignore_eos:
            longer.finish_reason = "stop"
            search.completed.append(longer)
        else:
            search.beams.append(longer)
