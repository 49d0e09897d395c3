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

from pegboard.data.pooling_params import TOKEN_TASKS, Pooling, PoolingParams
from pegboard.interfaces.pooler import Pooler, PoolerSetup, PoolStep
from pegboard_testing.fake_gpu import DEVICE, FakeCopies, FakeGPU

SIZE = 6
NUM_CLASSES = 3


def pool_step(
    lengths: Sequence[int],
    params: Sequence[PoolingParams] | None = None,
    *,
    rows: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    ends: Sequence[bool] | None = None,
    token_ids: Sequence[int] | None = None,
) -> PoolStep:
    """Return a step that computes so many tokens of each prompt: all of them, unless offsets and
    ends say something else. The value of a class is the sum of every third channel."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    ended = np.ones(len(lengths), bool) if ends is None else np.array(ends, bool)
    return PoolStep(
        rows=np.arange(len(lengths), dtype=np.int32) if rows is None else np.array(rows, np.int32),
        offsets=np.zeros(len(lengths), np.int64) if offsets is None else np.array(offsets),
        starts=starts,
        starts_on_device=torch.from_numpy(starts),
        ends=ended,
        last=torch.from_numpy(starts[1:][ended].astype(np.int64) - 1),
        token_ids=np.arange(starts[-1]) if token_ids is None else np.array(token_ids),
        params=[PoolingParams() for _ in lengths] if params is None else params,
        classify=lambda pooled: pooled.unflatten(-1, (-1, NUM_CLASSES)).sum(1),
    )


def check(results: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for result, each in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, each, rtol=1e-5, atol=1e-6)


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
        given = [PoolingParams() for _ in lengths] if params is None else params
        for result, each in zip(results, given, strict=True):
            dims = 2 if (each.task or self.pooling.task) in TOKEN_TASKS else 1
            assert result.dtype == np.float32 and result.ndim == dims, (
                f"a result is {result.dtype} {result.shape}, expected float32 of {dims} dimensions"
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

    @pytest.mark.parametrize("seed", range(4))
    def test_a_prompt_in_several_steps_has_the_same_result(self, seed: int) -> None:
        """With prompts of all tasks, some of which leave their rows and come again."""
        if self.pooling.whole_prompts:
            return  # there is one step
        random = np.random.default_rng(seed)
        tasks = [self.pooling.task, *self.pooling.tasks]
        lengths = random.integers(1, 9, 5).tolist()
        params = [PoolingParams(task=tasks[i % len(tasks)]) for i in range(len(lengths))]
        states = [torch.randn(n, SIZE, generator=torch.Generator().manual_seed(n)) for n in lengths]
        alone = [
            self.vectors(hidden, [len(hidden)], [each])[0]
            for hidden, each in zip(states, params, strict=True)
        ]
        pooler = self.pooler(PoolerSetup(self.pooling))
        computed = [0] * len(lengths)
        results = {}
        while len(results) < len(lengths):
            left = [i for i in range(len(lengths)) if i not in results]
            rows = [i for i in left if random.random() < 0.8] or left[:1]
            if random.random() < 0.2:  # the first one starts again
                pooler.remove(np.array(rows[:1]))
                computed[rows[0]] = 0
            offsets = [computed[i] for i in rows]
            counts = [int(random.integers(1, lengths[i] - computed[i] + 1)) for i in rows]
            parts = []
            for i, first, count in zip(rows, offsets, counts, strict=True):
                parts.append(states[i][first : first + count])
                computed[i] += count
            ends = [computed[i] == lengths[i] for i in rows]
            given = [params[i] for i in rows]
            step = pool_step(counts, given, rows=rows, offsets=offsets, ends=ends)
            arrays = pooler.pool(torch.cat(parts), step)()
            ended = [i for i, is_over in zip(rows, ends, strict=True) if is_over]
            assert len(arrays) == len(ended)
            results |= dict(zip(ended, arrays, strict=True))
        for i, expected in enumerate(alone):
            np.testing.assert_allclose(results[i], expected, rtol=1e-4, atol=1e-5)

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
            check(wait(), vectors)

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
            check(wait(), expected)

    def test_each_request_has_its_parameters(self) -> None:
        hidden = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1)).repeat(2, 1)
        params = [PoolingParams(use_activation=flag) for flag in (True, True, False, False)]
        together = self.vectors(hidden, [1, 1, 1, 1], params)
        alone = self.vectors(hidden[:1], [1], params[2:3])
        check(together[2:3], alone)
        if self.pooling.dimensions is not None:
            short = self.vectors(hidden[:1], [1], [PoolingParams(dimensions=2)])
            assert short[0].shape[-1] == 2
