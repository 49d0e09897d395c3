"""Turns hidden states into the vectors of prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pegboard.data.batch import NewRequest
from pegboard.data.pooling_params import Pooling, PoolingParams
from pegboard.interfaces.platform import Trait
from pegboard.worker.step_inputs import StepInputs


class Pooler:
    """The parameters of each row that runs a pooling request. traits: the stages of the model that
    are used."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self.traits: tuple[Trait, ...] = (
            ("forward", "logits") if pooling.task == "classify" else ("forward",)
        )
        self._params: dict[int, PoolingParams] = {}

    def add(self, new: NewRequest) -> None:
        """Remember how to pool this row."""
        self._params[new.row] = new.pooling or PoolingParams()

    def pool(
        self, hidden: Tensor, inputs: StepInputs, classify: Callable[[Tensor], Tensor]
    ) -> list[np.ndarray]:
        """Return one float32 vector for each row whose prompt ends in this step. hidden: [T, size],
        of all tokens. classify: pooled states [S, size] → values of the classes [S, C]. A vector of
        zeros stays as it is."""
        pooled = self._pooled(hidden, inputs)
        vectors = (
            (classify(pooled) if self._pooling.task == "classify" else pooled).float().cpu().numpy()
        )
        rows = inputs.sample_rows.tolist()
        return [
            self._finish(vector, self._params[row])
            for vector, row in zip(vectors, rows, strict=True)
        ]

    def _pooled(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """Return one state per prompt. CLS and MEAN only see prompts that are computed in one
        step."""
        if self._pooling.pooling_type == "LAST":
            return hidden if inputs.logits_index is None else hidden[inputs.logits_index]
        starts = torch.from_numpy(
            inputs.query_start_loc[: len(inputs.sample_rows) + 1].astype(np.int64)
        )
        if self._pooling.pooling_type == "CLS":
            return hidden[starts[:-1].to(hidden.device)]
        means = torch.segment_reduce(
            hidden[: inputs.num_tokens].float(), "mean", lengths=starts.diff().to(hidden.device)
        )
        return means.to(hidden.dtype)

    def _finish(self, vector: np.ndarray, params: PoolingParams) -> np.ndarray:
        vector = vector[: params.dimensions].copy()  # the buffer belongs to the next step
        if params.use_activation is False:
            return vector
        match self._pooling.activation:
            case "normalize":
                vector /= max(float(np.linalg.norm(vector)), 1e-12)
            case "softmax":
                vector = np.exp(vector - vector.max())
                vector /= vector.sum()
            case "sigmoid":
                vector = 1 / (1 + np.exp(-vector))
        return vector
