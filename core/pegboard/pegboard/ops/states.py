"""Layers with a state per request instead of keys and values per token: short convolutions and state-space models.

A step has B rows with T tokens in total. Every op reads the state of each row, computes the row's tokens, and writes the state
after them, so that a prompt can be computed in any pieces. Rows of one token (decodes) are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

CHUNK = 64
"""Tokens that `chunked_scan` computes with one matrix product."""


@dataclass(slots=True)
class StateRows:
    """Where the rows of a step have their states. blocks: int64 [B], indices of states. is_new: bool [B]: the state is zero,
    whatever its memory contains. starts: B + 1 numbers; row b has the tokens starts[b] to starts[b + 1]. singles: int64, rows of
    one token, and single_tokens: int64, their tokens; None if all rows have one token.
    """

    blocks: Tensor
    is_new: Tensor
    starts: list[int]
    singles: Tensor | None = None
    single_tokens: Tensor | None = None

    def single(self) -> tuple[Tensor | slice, Tensor, Tensor]:
        """Return the tokens of the rows of one token, their blocks, and whether they are new."""
        if self.singles is None or self.single_tokens is None:
            return slice(None), self.blocks, self.is_new
        return self.single_tokens, self.blocks[self.singles], self.is_new[self.singles]

    def longer(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (first token, end, block, is new) of each row of several tokens."""
        if self.singles is None:
            return
        for row, (first, end) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            if end - first > 1:
                yield first, end, int(self.blocks[row]), bool(self.is_new[row])


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, activates: bool) -> Tensor:
    """Convolve each channel with its last K inputs: x [T, C], weight [C, K], bias [C] or None → [T, C].

    state: [blocks, C, K - 1], the last inputs of each row. activates: the result goes through SiLU.
    """
    out = torch.empty_like(x)
    tokens, blocks, is_new = rows.single()
    if len(blocks):
        past = state[blocks].masked_fill(is_new[:, None, None], 0)
        window = torch.cat((past.to(x.dtype), x[tokens].unsqueeze(-1)), -1)
        out[tokens] = (window * weight).sum(-1)
        state[blocks] = window[..., 1:].to(state.dtype)
    for first, end, block, new in rows.longer():
        past = torch.zeros_like(state[block]) if new else state[block]
        window = torch.cat((past.to(x.dtype), x[first:end].T), -1)
        out[first:end] = conv1d(window.unsqueeze(0), weight.unsqueeze(1), groups=len(weight))[0].T
        state[block] = window[:, end - first :]
    if bias is not None:
        out += bias
    return silu(out) if activates else out


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, rows: StateRows
) -> Tensor:
    """The scan of Mamba (Gu & Dao 2023, algorithm 2): h ← exp(dt a) h + dt b x, y = h c + skip x. → y [T, D], type of x.

    x: [T, D]. dt: float32 [T, D], positive step sizes. a: float32 [D, N], negative. b, c: [T, N], of every token. skip: [D].
    state: h, float32 [blocks, D, N].
    """
    wide, b, c = x.float(), b.float(), c.float()
    out = wide * skip.float()
    tokens, blocks, is_new = rows.single()
    if len(blocks):
        own = state[blocks].masked_fill(is_new[:, None, None], 0)
        step = dt[tokens].unsqueeze(-1)
        own = own * torch.exp(step * a) + step * b[tokens].unsqueeze(1) * wide[tokens].unsqueeze(-1)
        out[tokens] += (own * c[tokens].unsqueeze(1)).sum(-1)
        state[blocks] = own
    for first, end, block, new in rows.longer():
        own = torch.zeros_like(state[block]) if new else state[block]
        for token in range(first, end):
            own = own * torch.exp(dt[token, :, None] * a) + (dt[token] * wide[token])[:, None] * b[token]
            out[token] += own @ c[token]
        state[block] = own
    return out.to(x.dtype)


def chunked_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, rows: StateRows) -> Tensor:
    """The scan of Mamba-2 (Dao & Gu 2024, section 6): h ← exp(dt a) h + dt x bᵀ, y = h c + skip x. → y [T, H, P], type of x.

    x: [T, H, P]. dt: float32 [T, H], positive step sizes. a: float32 [H], negative. b, c: [T, G, N]; H is a multiple of G, and
    the heads of a group share them. skip: [H]. state: h, float32 [blocks, H, P, N].
    """
    repeats = x.shape[1] // b.shape[1]
    wide, b, c = x.float(), b.float().repeat_interleave(repeats, 1), c.float().repeat_interleave(repeats, 1)
    out = wide * skip.float().unsqueeze(-1)
    tokens, blocks, is_new = rows.single()
    if len(blocks):
        own = state[blocks].masked_fill(is_new[:, None, None, None], 0)
        step = dt[tokens]
        own = own * torch.exp(step * a)[..., None, None]
        own = own + (step.unsqueeze(-1) * wide[tokens]).unsqueeze(-1) * b[tokens].unsqueeze(2)
        out[tokens] += (own @ c[tokens].unsqueeze(-1)).squeeze(-1)
        state[blocks] = own
    for first, end, block, new in rows.longer():
        own = torch.zeros_like(state[block]) if new else state[block]
        for start in range(first, end, CHUNK):
            part = slice(start, min(start + CHUNK, end))
            found, own = _chunk(wide[part], dt[part], a, b[part], c[part], own)
            out[part] += found
        state[block] = own
    return out.to(x.dtype)


def _chunk(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y [L, H, P] without skip, the state after it) of L tokens: each reads the tokens before it, through one matrix of
    decays per head, and the state before the chunk."""
    decay = (dt * a).cumsum(0).T  # [H, L], the logarithm of what is left of the state
    between = (decay.unsqueeze(2) - decay.unsqueeze(1)).tril().exp().tril()
    scores = torch.einsum("ihn,jhn->hij", c, b) * between * dt.T.unsqueeze(1)
    y = torch.einsum("hij,jhp->ihp", scores, x) + torch.einsum("ihn,hpn,hi->ihp", c, state, decay.exp())
    left = (decay[:, -1:] - decay).exp() * dt.T
    return y, state * decay[:, -1, None, None].exp() + torch.einsum("hj,jhp,jhn->hpn", left, x, b)
