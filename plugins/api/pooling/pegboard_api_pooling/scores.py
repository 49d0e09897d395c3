"""Scores of pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.data.output import RequestOutput
from pegboard.data.similarity import similarity
from pegboard.errors import RequestError
from pegboard.interfaces.api import EngineClient, Prompt
from pegboard_api_pooling.answers import check_salt
from pegboard_api_pooling.fields import Document, PoolingFields, RerankRequest, ScoreRequest
from pegboard_server.pooling import Run, values


class Scorer:
    """A model with one class reads both texts at once, and its value is the score. With a model
    that makes vectors, it is their similarity."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def scores(
        self, run: Run, request: PoolingFields, pairs: Sequence[tuple[str, str]]
    ) -> tuple[list[float], list[RequestOutput]]:
        """Return the scores of all pairs, and the outputs that they were made of. Raises
        RequestError if the model has several classes."""
        salt = check_salt(request)
        model = self._client.models()[0]
        if model.task != "classify":
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            params = request.params(model.pooling.task if model.pooling else "embed")
            prompts = [Prompt(text=text, cache_salt=salt) for text in texts]
            outputs = await run.outputs(prompts, params)
            arrays = {text: output.pooled() for text, output in zip(texts, outputs, strict=True)}
            return [similarity(arrays[first], arrays[second]) for first, second in pairs], outputs
        if len(model.labels) != 1:
            reason = (
                "a score is the value of a model with one class, and this model has "
                f"{len(model.labels)}; use /classify"
            )
            raise RequestError(reason, parameter="model")
        prompts = [
            Prompt(text=first, second_text=second, cache_salt=salt) for first, second in pairs
        ]
        outputs = await run.outputs(prompts, request.params("classify"))
        return [values(output)[0] for output in outputs], outputs


def read_pairs(request: ScoreRequest, most: int) -> list[tuple[str, str]]:
    """Return the pairs of texts. One text is scored with all others. Raises RequestError, which
    names the field that is wrong."""
    columns = []
    for given in (
        {"text_1": request.text_1, "data_1": request.data_1},
        {"text_2": request.text_2, "data_2": request.data_2},
    ):
        named = [(name, value) for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise RequestError(f"give one of {' and '.join(given)}", parameter=next(iter(given)))
        name, value = named[0]
        columns.append(checked([value] if isinstance(value, str) else value, name, most))
    first, second = columns
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        reason = (
            f"{len(first)} texts are scored with {len(second)}; give one text, or as many as the "
            "others"
        )
        raise RequestError(reason, parameter="text_1")
    return list(zip(first, second, strict=True))


def read_documents(request: RerankRequest, most: int) -> list[str]:
    """Return the texts of the documents. Raises RequestError, which names the field that is
    wrong."""
    checked([request.query], "query", most)
    texts = [each.text if isinstance(each, Document) else each for each in request.documents]
    return checked(texts, "documents", most)


def checked(texts: list[str], name: str, most: int) -> list[str]:
    """Return the texts. Raises RequestError if there are none or too many, or if one is empty."""
    if not texts or not all(texts):
        raise RequestError(f"{name} must not be empty", parameter=name)
    if len(texts) > most:
        raise RequestError(
            f"{name}: {len(texts)} texts in one request, at most {most} are allowed", parameter=name
        )
    return texts


def rank(scores: Sequence[float], top_n: int) -> list[int]:
    """Return the indices of the best scores, best first. top_n: how many; 0 = all."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return order[: top_n or None]
