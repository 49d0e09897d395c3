"""Contract tests of the kind `pooler`. A plugin's test file:

class TestMyPooler(PoolerContract):
    pooling = Pooling(task="embed", method={"how": "max"})

    def pooler(self, setup: PoolerSetup) -> Pooler:
        return MyPooler(options, setup)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from pegboard.data.pooling_params import Pooling, PoolingParams
from pegboard.interfaces.pooler import Pooler, PoolerSetup, PoolStep
from pegboard_testing.fake_gpu import DEVICE, FakeCopies, FakeGPU

SIZE = 6
NUM_CLASSES = 3


def pool_step(lengths: Sequence[int], params: Sequence[PoolingParams] | None = None) -> PoolStep:
    """Return a step in which prompts of these lengths are computed as a whole. The value of a class
    is the sum of every third channel."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return PoolStep(
        starts=starts,
        starts_on_device=torch.from_numpy(starts),
        last=torch.from_numpy(starts[1:].astype(np.int64) - 1),
        params=[PoolingParams() for _ in lengths] if params is None else params,
        classify=lambda pooled: pooled.unflatten(-1, (-1, NUM_CLASSES)).sum(1),
    )


class PoolerContract:
    """Every pooler passes these. Override `pooling` and `pooler`."""

    pooling: Pooling

    def pooler(self, setup: PoolerSetup) -> Pooler:
        """Return a new pooler."""
        raise AssertionError("override PoolerContract.pooler")

    def vectors(
        self, hidden: Tensor, lengths: Sequence[int], params: Sequence[PoolingParams] | None = None
    ) -> list[np.ndarray]:
        results = self.pooler(PoolerSetup(self.pooling)).pool(hidden, pool_step(lengths, params))()
        assert isinstance(results, list) and len(results) == len(lengths), (
            f"{len(lengths)} prompts end in the step, and there are {len(results)} vectors"
        )
        for vector in results:
            assert vector.dtype == np.float32 and vector.ndim == 1, (
                f"a vector is {vector.dtype} {vector.shape}, expected float32 of one dimension"
            )
        return results

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_prompt_has_the_same_vector_alone_and_in_a_batch(self, dtype: torch.dtype) -> None:
        lengths = [3, 1, 5, 1]
        hidden = torch.randn(sum(lengths), SIZE, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(dtype)
        before = hidden.clone()
        together = self.vectors(hidden, lengths)
        assert torch.equal(hidden, before), "the hidden states are changed"
        for part, length, vector in zip(hidden.split(lengths), lengths, together, strict=True):
            (alone,) = self.vectors(part, [length])
            np.testing.assert_allclose(vector, alone, rtol=1e-5, atol=1e-6)

    def test_the_vectors_are_copies(self) -> None:
        hidden = torch.ones(2, SIZE)
        for vector in self.vectors(hidden, [1, 1]):
            vector[:] = 7
        assert torch.equal(hidden, torch.ones(2, SIZE))

    def test_the_vectors_are_read_late(self) -> None:
        """The next steps overwrite what the first one was given."""
        pooler = self.pooler(PoolerSetup(self.pooling))
        generator = torch.Generator().manual_seed(2)
        steps = [torch.randn(4, SIZE, generator=generator) for _ in range(2)]
        expected = [self.vectors(hidden, [3, 1]) for hidden in steps]
        given = torch.zeros(4, SIZE)
        waits = []
        for hidden in steps:
            given.copy_(hidden)
            step = pool_step([3, 1])
            waits.append(pooler.pool(given, step))
            step.starts[:] = -1
        given.zero_()
        for wait, vectors in zip(waits, expected, strict=True):
            np.testing.assert_allclose(wait(), vectors, rtol=1e-5, atol=1e-6)

    def test_nothing_waits_for_a_device(self) -> None:
        """What is computed on a device is downloaded, and read when it is asked for."""
        hidden = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(3))
        expected = self.vectors(hidden, [3, 1])
        with FakeGPU() as gpu:
            step = pool_step([3, 1])
            step.starts_on_device = step.starts_on_device.to(DEVICE)
            step.last = None if step.last is None else step.last.to(DEVICE)
            given = hidden.to(DEVICE)
            waits = gpu.host_reads, gpu.blocking_uploads
            wait = self.pooler(PoolerSetup(self.pooling, FakeCopies())).pool(given, step)
            assert (gpu.host_reads, gpu.blocking_uploads) == waits
            given.zero_()
            np.testing.assert_allclose(wait(), expected, rtol=1e-5, atol=1e-6)

    def test_each_request_has_its_parameters(self) -> None:
        hidden = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1)).repeat(2, 1)
        params = [PoolingParams(use_activation=flag) for flag in (True, True, False, False)]
        together = self.vectors(hidden, [1, 1, 1, 1], params)
        alone = self.vectors(hidden[:1], [1], params[2:3])
        np.testing.assert_allclose(together[2], alone[0], rtol=1e-5, atol=1e-6)
        if self.pooling.dimensions is not None:
            short = self.vectors(hidden[:1], [1], [PoolingParams(dimensions=2)])
            assert len(short[0]) == 2
