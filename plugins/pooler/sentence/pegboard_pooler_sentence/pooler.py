"""Turns hidden states into the vectors of prompts."""

from __future__ import annotations

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

    def pool(self, hidden: Tensor, step: PoolStep) -> list[np.ndarray]:
        """See `Pooler.pool`."""
        pooled = self._pooled(hidden, step)
        values = step.classify(pooled) if self._classifies else pooled
        vectors = values.float().cpu().numpy()
        return [
            self._finish(vector, params)
            for vector, params in zip(vectors, step.params, strict=True)
        ]

    def _pooled(self, hidden: Tensor, step: PoolStep) -> Tensor:
        """Return one state per prompt."""
        if self._pooling_type == "LAST":
            return hidden if step.last is None else hidden[step.last]
        starts = torch.from_numpy(step.starts.astype(np.int64))
        if self._pooling_type == "CLS":
            return hidden[starts[:-1].to(hidden.device)]
        lengths = starts.diff().to(hidden.device)
        return torch.segment_reduce(hidden.float(), "mean", lengths=lengths).to(hidden.dtype)

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
