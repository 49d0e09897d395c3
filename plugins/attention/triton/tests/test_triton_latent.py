"""The kernels of latent attention under Triton's interpreter, compared with plain torch."""

from __future__ import annotations

import pytest
import torch
from pegboard_attention_triton import latent
from pegboard_attention_triton.attention import Tiles

pytestmark = pytest.mark.usefixtures("interpreted_triton")

TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALE = 0.2
BLOCK_SIZE = 4


class Step:
    """Rows of random queries and latents in shuffled blocks, and `padding` tokens of no row.
    Unused slots hold large numbers."""

    def __init__(
        self,
        counts: list[int],
        lengths: list[int],
        heads: int = 5,
        dtype: torch.dtype = torch.float32,
        rank: int = 24,
        rope: int = 8,
        padding: int = 0,
    ) -> None:
        used = [-(-length // BLOCK_SIZE) for length in lengths]
        order = torch.randperm(sum(used), dtype=torch.int32).add_(1).split(used)
        self.table = torch.zeros(len(lengths), max(used) + 1, dtype=torch.int32)
        for row, blocks in zip(self.table, order, strict=True):
            row[: len(blocks)] = blocks
        memory = torch.randn(sum(used) + 1, BLOCK_SIZE * (rank + rope) + 16).to(dtype)
        self.cache = memory[:, 16:].unflatten(1, (BLOCK_SIZE, rank + rope))
        self.counts = counts
        self.lengths = lengths
        self.starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        self.lens = torch.tensor(lengths, dtype=torch.int32)
        self.num_tokens = sum(counts) + padding
        self.q = torch.randn(heads, self.num_tokens, rank).to(dtype).transpose(0, 1)
        self.q_rope = torch.randn(self.num_tokens, heads, rope + 3).to(dtype)[..., 3:]

    def found(self, num_keys: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results [T, H, C] and the logarithms [T, H]."""
        lse = torch.empty(self.q.shape[:2])
        rows = (self.table, self.starts, self.lens)
        plain = latent.latent_attention(self.q, self.q_rope, self.cache, *rows, SCALE, num_keys)
        given = (*rows, SCALE, num_keys, lse)
        part = latent.latent_attention(self.q, self.q_rope, self.cache, *given)
        assert torch.equal(plain, part)
        return plain, lse

    def expected(self, num_keys: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        rank = self.q.shape[2]
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float64)
        token = 0
        for row, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            keys = self.cache[self.table[row].long()].flatten(0, 1).double()
            for place in range(count):
                seen = length - count + place + 1 if num_keys is None else num_keys[token]
                query = torch.cat((self.q[token], self.q_rope[token]), -1).double()
                scores = query @ keys[:seen].T * SCALE
                lse[token] = scores.logsumexp(-1)
                out[token] = scores.softmax(-1) @ keys[:seen, :rank]
                token += 1
        return out, lse

    def check(self, num_keys: list[int] | None = None) -> None:
        given = None
        if num_keys is not None:
            given = torch.tensor(num_keys, dtype=torch.int32)
        allowed = TOLERANCES[self.q.dtype]
        for found, expected in zip(self.found(given), self.expected(num_keys), strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=allowed, atol=allowed)


MIXED = ([1, 4, 0, 1, 19], [7, 9, 30, 1, 19])
"""(new tokens, length) of rows: a decode, a chunk that follows cached tokens, a row without new
tokens, a prompt of one token, and a whole prompt."""


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_mixed_step(dtype: torch.dtype) -> None:
    Step(*MIXED, dtype=dtype).check()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "tokens"), [(2, 1), (2, 3), (20, 1)])
def test_tiles(monkeypatch: pytest.MonkeyPatch, splits: int, heads: int, tokens: int) -> None:
    """Several heads of several tokens in a tile, or some of the heads of one token. Tokens of no
    row become zero."""
    tiles = Tiles(tokens, 16, 16, splits, 4)
    monkeypatch.setattr(latent, "latent_tiles", lambda *shapes: tiles)
    Step([4, 1, 0, 5], [70, 33, 5, 40], heads, padding=2).check()


def test_numbers_of_keys() -> None:
    """Some tokens have no keys, and some see later ones."""
    step = Step([3, 1, 2], [9, 4, 2])
    step.check([0, 7, 9, 0, 2, 2])


def test_chosen_tiles() -> None:
    """Every tile has room for its heads, and only steps of few tokens are split."""
    for heads in (1, 5, 16, 20, 128):
        for rank, itemsize in ((16, 4), (256, 2), (512, 2), (512, 4)):
            for num_tokens, num_rows in ((1, 1), (64, 64), (9, 3), (4096, 2)):
                shapes = (num_tokens, num_rows, heads, rank, itemsize, 8192, 132)
                tiles = latent.latent_tiles(*shapes)
                assert tiles.tokens >= 1
                assert tiles.tokens * min(heads, tiles.queries) <= tiles.queries
                assert tiles.splits == 1 or num_tokens <= 16 * num_rows
                assert tiles.queries >= 16


def test_a_step_without_tokens() -> None:
    step = Step([0], [3])
    latent.store_latents(step.q[:, 0], step.q_rope[:, 0], step.cache, step.lens[:0].long())
    assert step.found()[0].shape == (0, 5, 24)
