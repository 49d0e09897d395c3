"""Turns hidden states into vectors and classes, of prompts or of their tokens."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pegboard.data.pooling_params import TOKEN_TASKS, PoolingParams
from pegboard.errors import ModelError
from pegboard.interfaces.pooler import PoolerSetup, PoolStep
from pegboard_pooler_sentence.dense import make_dense
from pegboard_pooler_sentence.instructions import AfterInstruction
from pegboard_pooler_sentence.reduce import AT_ONCE, Reduction, make_reduction
from pegboard_pooler_sentence.tokens import Matrices, reader
from pegboard_pooler_sentence.words import WordPooling

NONE = np.empty((0, 0), np.float32)


class SentencePooler:
    """Implements `pegboard.interfaces.pooler.Pooler`. A vector of zeros stays as it is."""

    def __init__(self, options: None, setup: PoolerSetup) -> None:
        method = setup.pooling.method
        self._classifies = setup.pooling.makes == "classify"
        self._task = setup.pooling.task
        self._activation = method["activation"]
        self._copies = setup.copies
        types = method["pooling_types"]
        words = method.get("words")
        names = [name for name in types.split(",") if name]
        is_instructed = bool(method.get("instructed"))
        self._reductions: list[Reduction] = (
            [WordPooling(words, types)]
            if words
            else [
                AfterInstruction(setup)
                if is_instructed and name == "MEAN"
                else make_reduction(name)
                for name in names
            ]
        )
        self._dense = make_dense(method.get("dense", "[]"))
        self._tokens = token_ids(setup)
        self._subtracts = bool(method.get("subtracts"))
        self._mean = float(method.get("logit_mean", 0.0))
        self._sigma = float(method.get("logit_sigma", 1.0))
        self._dimensions: int | None = json.loads(method.get("dimensions", "null"))
        self._matrices = Matrices(self._token_values, setup.copies, method)

    def remove(self, rows: np.ndarray) -> None:
        """See `Pooler.remove`."""
        for row in rows.tolist():
            self._matrices.remove(row)
            for reduction in self._reductions:
                reduction.remove(row)

    def pool(self, hidden: Tensor, step: PoolStep) -> Callable[[], list[np.ndarray]]:
        """See `Pooler.pool`."""
        ended = np.flatnonzero(step.ends).tolist()
        of_tokens = [i for i, each in enumerate(step.params) if self._is_of_tokens(each)]
        matrices = self._matrices.take(hidden, step, of_tokens) if of_tokens else {}
        has_vectors = len(of_tokens) < len(step.params)
        vectors = self._vectors(hidden, step) if has_vectors else None

        params = step.params

        def results() -> list[np.ndarray]:
            rows = NONE if vectors is None else vectors()
            arrays = []
            for number, place in enumerate(ended):
                read = matrices.get(place)
                array = rows[number] if read is None else read()
                arrays.append(self._finished(array, params[place]))
            return arrays

        return results

    def _is_of_tokens(self, params: PoolingParams) -> bool:
        return (params.task or self._task) in TOKEN_TASKS

    def _vectors(self, hidden: Tensor, step: PoolStep) -> Callable[[], np.ndarray]:
        """Return what reads the values [S, n] of the prompts that end."""
        states = [reduction.reduce(hidden, step) for reduction in self._reductions]
        pooled = states[0] if len(states) == 1 else torch.cat(states, 1)
        if not len(pooled):
            return lambda: NONE
        return reader(self._values(pooled, step), self._copies)

    def _values(self, states: Tensor, step: PoolStep) -> Tensor:
        """Return values of classes, or vectors. They are valid until the next call."""
        for dense in self._dense:
            states = dense(states)
        if not self._classifies:
            return states
        values = step.classify(states)
        if self._tokens:  # a list as an index would be copied to the device, which waits
            values = torch.stack([values[:, token_id] for token_id in self._tokens], 1)
        return values[:, 1:] - values[:, :1] if self._subtracts else values

    def _token_values(self, states: Tensor, step: PoolStep) -> Tensor:
        """Return the values of each token. Those of classes are computed a few at a time, because
        they may be as many as the vocabulary has tokens."""
        if not self._classifies:
            return self._values(states, step)
        return torch.cat([self._values(some, step).clone() for some in states.split(AT_ONCE)])

    def _finished(self, values: np.ndarray, params: PoolingParams) -> np.ndarray:
        """Return the result of values [n] or [tokens, n]."""
        values = values[..., : params.dimensions or self._dimensions].copy()
        if self._classifies and (self._mean or self._sigma != 1.0):
            values = (values - self._mean) / self._sigma
        if params.use_activation is False:
            return values
        match self._activation:
            case "normalize":
                norms = np.linalg.norm(values, axis=-1, keepdims=True)
                values /= np.maximum(norms, 1e-12)
            case "softmax":
                values = np.exp(values - values.max(-1, keepdims=True))
                values /= values.sum(-1, keepdims=True)
            case "sigmoid":
                values = 1 / (1 + np.exp(-values))
        return values


def token_ids(setup: PoolerSetup) -> list[int]:
    """Return the ids of the tokens whose logits are the values of classes. Raises ModelError for a
    text that is not one token."""
    if ids := json.loads(setup.pooling.method.get("token_ids", "[]")):
        return list(ids)
    tokens = json.loads(setup.pooling.method.get("tokens", "[]"))
    if not tokens:
        return []
    if setup.vocabulary is None:
        raise ModelError("classifier_from_token needs a tokenizer, and there is none")
    written = {token: place for place, token in enumerate(setup.vocabulary().token_bytes)}
    # tokenizers write the space before a word as one of these; some put it before every word
    texts = [token.replace("▁", " ").replace("Ġ", " ").encode() for token in tokens]
    places = [written.get(text, written.get(b" " + text)) for text in texts]
    if None in places:
        raise ModelError(
            f"classifier_from_token: {tokens[places.index(None)]!r:.60} is not one token of the "
            "model's tokenizer"
        )
    return [place for place in places if place is not None]
