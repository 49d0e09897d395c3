"""Results of LLM that are vectors, classes and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pegboard.data.output import (
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pegboard.data.similarity import similarity
from pegboard.errors import RequestError

Result = TypeVar("Result", bound=PoolingRequestOutput[Any])


def results_of(
    outputs: Sequence[PoolingRequestOutput[PoolingOutput]],
    result: type[Result],
    make: Callable[[list[float]], object],
) -> list[Result]:
    """Return the same results in another class. make: of the numbers of each."""
    return [
        result(
            output.request_id,
            make(output.outputs.data.tolist()),
            output.prompt_token_ids,
            output.num_cached_tokens,
        )
        for output in outputs
    ]


def text_pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of texts to score. Raises RequestError if the numbers of texts do not
    fit."""
    ones, others = ([texts] if isinstance(texts, str) else list(texts) for texts in (first, second))
    if wrong := [text for text in (*ones, *others) if not isinstance(text, str)]:
        raise RequestError(
            f"a score is that of two texts, got {type(wrong[0]).__name__}", parameter="data_1"
        )
    if not ones or not others:
        raise RequestError(
            "there are no texts to score", parameter="data_1" if not ones else "data_2"
        )
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        reason = (
            f"{len(ones)} texts are scored with {len(others)}; give one text, or as many as the "
            "others"
        )
        raise RequestError(reason, parameter="data_1")
    return list(zip(ones, others, strict=True))


Pooled = PoolingRequestOutput[PoolingOutput]


def scored(first: Pooled, second: Pooled) -> ScoringRequestOutput:
    """Return the similarity of what a model made of two texts."""
    token_ids = [*(first.prompt_token_ids or ()), *(second.prompt_token_ids or ())]
    score = similarity(first.outputs.data, second.outputs.data)
    return ScoringRequestOutput(
        f"{first.request_id}-{second.request_id}", ScoringOutput(score), token_ids
    )


def score_of_classes(output: Pooled) -> ScoringRequestOutput:
    """Return the value of the only class. Raises RequestError if the model has more."""
    if len(output.outputs.data) != 1:
        raise RequestError(
            "a score is the value of a model with one class, and this model has "
            f"{len(output.outputs.data)}"
        )
    return results_of([output], ScoringRequestOutput, lambda values: ScoringOutput(values[0]))[0]
