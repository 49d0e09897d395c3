"""Turns hidden states into the vectors of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import ModelError
from pegboard.interfaces.pooler import PoolerSetup, PoolStep


class SentencePooler:
    """Implements `pegboard.interfaces.pooler.Pooler`. A vector of zeros stays as it is."""

    def __init__(self, options: None, setup: PoolerSetup) -> None:
        self._classifies = setup.pooling.task == "classify"
        self._pooling_type = setup.pooling.method["pooling_type"]
        self._activation = setup.pooling.method["activation"]
        self._copies = setup.copies
        self._tokens = self._token_ids(setup)
        self._subtracts = bool(setup.pooling.method.get("subtracts"))

    @staticmethod
    def _token_ids(setup: PoolerSetup) -> list[int]:
        """Return the ids of the tokens whose logits are the values of classes. Raises ModelError
        for a text that is no token."""
        tokens = json.loads(setup.pooling.method.get("tokens", "[]"))
        if not tokens:
            return []
        if setup.vocabulary is None:
            raise ModelError("classifier_from_token needs a tokenizer, and there is none")
        written = {token: place for place, token in enumerate(setup.vocabulary().token_bytes)}
        # tokenizers write the space before a word as one of these; some put it before every word
        texts = [token.replace("▁", " ").replace("Ġ", " ").encode() for token in tokens]
        ids = [written.get(text, written.get(b" " + text)) for text in texts]
        if None in ids:
            raise ModelError(
                f"classifier_from_token: {tokens[ids.index(None)]!r:.60} is not one token of the "
                "model's tokenizer"
            )
        return [each for each in ids if each is not None]

    def pool(self, hidden: Tensor, step: PoolStep) -> Callable[[], list[np.ndarray]]:
        """See `Pooler.pool`."""
        pooled = self._pooled(hidden, step)
        values = step.classify(pooled) if self._classifies else pooled
        if self._tokens:
            values = values[:, self._tokens]
        if self._subtracts:
            values = values[:, 1:] - values[:, :1]
        params = step.params
        if self._copies is None:
            vectors = self._finished(values, params)
            return lambda: vectors
        wait = self._copies.download(values)
        return lambda: self._finished(wait(), params)

    def _pooled(self, hidden: Tensor, step: PoolStep) -> Tensor:
        """Return one state per prompt."""
        if self._pooling_type == "LAST":
            return hidden if step.last is None else hidden[step.last]
        starts = step.starts_on_device
        if self._pooling_type == "CLS":
            return hidden[starts[:-1]]
        # to check the lengths, the host would wait for them
        means = torch.segment_reduce(hidden.float(), "mean", lengths=starts.diff(), unsafe=True)
        return means.to(hidden.dtype)

    def _finished(self, values: Tensor, params: Sequence[PoolingParams]) -> list[np.ndarray]:
        """Return the vectors of values [S, n], which are on the host."""
        vectors = values.float().numpy()
        return [self._finish(vector, each) for vector, each in zip(vectors, params, strict=True)]

    def _finish(self, vector: np.ndarray, params: PoolingParams) -> np.ndarray:
        vector = vector[: params.dimensions].copy()  # the buffer belongs to the next step
        if params.use_activation is False:
            return vector
        match self._activation:
            case "normalize":
                vector /= max(float(np.linalg.norm(vector)), 1e-12)
            case "softmax":
                vector = np.exp(vector - vector.max())
                vector /= vector.sum()
            case "sigmoid":
                vector = 1 / (1 + np.exp(-vector))
        return vector
