"""Turns the hidden states of last tokens into the vectors of their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pegboard.data.batch import NewRequest
from pegboard.data.pooling_params import PoolingParams


class Pooler:
    """The parameters of each row that runs a pooling request."""

    def __init__(self) -> None:
        self._params: dict[int, PoolingParams] = {}

    def add(self, new: NewRequest) -> None:
        """Note how the row's vector is made, in place of what the row held before."""
        self._params[new.row] = new.pooling or PoolingParams()

    def pool(self, hidden: Tensor, rows: Sequence[int]) -> list[np.ndarray]:
        """Return one float32 vector per row, from its last token's hidden state: hidden [len(rows), size]. A vector of zeros
        stays as it is."""
        vectors = hidden.float().cpu().numpy()
        return [self._finish(vector, self._params[row]) for vector, row in zip(vectors, rows, strict=True)]

    def _finish(self, vector: np.ndarray, params: PoolingParams) -> np.ndarray:
        vector = vector[: params.dimensions].copy()  # the buffer belongs to the next step
        if params.use_activation is not False:
            vector /= max(float(np.linalg.norm(vector)), 1e-12)
        return vector
