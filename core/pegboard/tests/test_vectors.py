"""The end of a request for a vector."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pegboard.data.pooling_params import PoolingParams
from pegboard.data.request import EngineRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.requests import BAD_VECTOR, completions_of


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, -math.inf])
def test_a_vector_that_is_not_finite_is_an_error(wrong: float | None) -> None:
    (request,) = completions_of(
        EngineRequest(
            request_id="a", prompt_token_ids=[1], params=SamplingParams(), pooling=PoolingParams()
        )
    )
    vector = np.array([0.5, -3e38, 3e38] if wrong is None else [0.5, wrong, 1.0], np.float32)
    delta, reason = request.embedded(vector)
    if wrong is None:
        assert (delta.embedding, delta.error, reason) == (vector.tobytes(), None, "stop")
    else:
        assert (delta.embedding, delta.error, reason) == (b"", BAD_VECTOR, "error")
