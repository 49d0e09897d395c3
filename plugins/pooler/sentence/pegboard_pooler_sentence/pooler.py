"""Turns hidden states into the vectors of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard.data.pooling_params import PoolingParams
from pegboard.interfaces.pooler import PoolerSetup, PoolStep


class SentencePooler:
    """Implements `pegboard.interfaces.pooler.Pooler`. A vector of zeros stays as it is."""

    def __init__(self, options: None, setup: PoolerSetup) -> None:
        self._classifies = setup.pooling.task == "classify"
        self._pooling_type = setup.pooling.method["pooling_type"]
        self._activation = setup.pooling.method["activation"]
        self._copies = setup.copies

    def pool(self, hidden: Tensor, step: PoolStep) -> Callable[[], list[np.ndarray]]:
        """See `Pooler.pool`."""
        pooled = self._pooled(hidden, step)
        values = step.classify(pooled) if self._classifies else pooled
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
