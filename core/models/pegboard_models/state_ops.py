"""The ops of layers with a state per request: short convolutions and state-space models. Kernel
plugins may make them faster.

A step has B rows with T tokens in total. Every op reads the state of each row, computes the row's
tokens, and writes the state after them, so that a prompt can be computed in any pieces. The first
rows of one token (decodes) are computed together. Nothing is read on the host, and rows that pad a
step change no state.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from pegboard.errors import CannotRecord
from pegboard.ops import StateRows

CHUNK = 64
"""Tokens that `chunked_scan` computes with one matrix product."""

DELTA_CHUNK = 16
"""Tokens that `gated_delta_rule` computes together. With a decay per channel, the memory grows with
the square of this."""


WKV_CHUNK = 16
"""Tokens that `wkv` computes together. The memory grows with the square of this."""

NOTHING = -1e38
"""The logarithm of the weights of no token."""


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, activates: bool
) -> Tensor:
    """Convolve each channel with its last K inputs: x [T, C], weight [C, K], bias [C] or None → [T,
    C].

    state: [blocks, C, K - 1], the last inputs of each row. activates: the result goes through SiLU.
    """
    out = torch.zeros_like(x)
    tokens, blocks, is_new = _single(rows)
    if len(blocks):
        past = state[blocks].masked_fill(is_new[:, None, None], 0)
        window = torch.cat((past.to(x.dtype), x[tokens].unsqueeze(-1)), -1)
        out[tokens] = (window * weight).sum(-1)
        _store(window[..., 1:].to(state.dtype), state, blocks, rows)
    for tokens, block, new in rows.longer():
        past = state[block][0].masked_fill(new, 0)
        window = torch.cat((past.to(x.dtype), x[tokens].T), -1)
        out[tokens] = conv1d(window.unsqueeze(0), weight.unsqueeze(1), groups=len(weight))[0].T
        state[block] = window[:, -past.shape[1] :].to(state.dtype)
    if bias is not None:
        out += bias
    return silu(out) if activates else out


def selective_scan(
    x: Tensor,
    steps: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """The scan of Mamba (Gu & Dao 2023, algorithm 2): h ← exp(dt a) h + dt b x, y = h c + skip x,
    where dt = softplus(steps) and a = -exp(a_log). → y [T, D], type of x.

    x, steps: [T, D]. a_log: float32 [D, N]. b, c: [T, N], of every token. skip: float32 [D]. state:
    h, float32 [blocks, D, N].
    """
    wide = x.float()
    dt = softplus(steps.float())
    a = -a_log.exp()
    b = b.float()
    c = c.float()
    out = wide * skip.float()
    tokens, blocks, is_new = _single(rows)
    if len(blocks):
        h = state[blocks].masked_fill(is_new[:, None, None], 0)
        step = dt[tokens].unsqueeze(-1)
        h = h * torch.exp(step * a) + step * b[tokens].unsqueeze(1) * wide[tokens].unsqueeze(-1)
        out[tokens] += (h * c[tokens].unsqueeze(1)).sum(-1)
        _store(h, state, blocks, rows)
    for tokens, block, new in rows.longer():
        h = state[block][0].masked_fill(new, 0)
        for token in range(tokens.start, tokens.stop):
            h = (
                h * torch.exp(dt[token, :, None] * a)
                + (dt[token] * wide[token])[:, None] * b[token]
            )
            out[token] += h @ c[token]
        state[block] = h
    return out.to(x.dtype)


def chunked_scan(
    x: Tensor,
    steps: Tensor,
    bias: Tensor,
    limits: tuple[float, float],
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """The scan of Mamba-2 (Dao & Gu 2024, section 6): h ← exp(dt a) h + dt x bᵀ, y = h c + skip x,
    where dt = softplus(steps + bias) within the limits and a = -exp(a_log). → y [T, H, P], type of
    x.

    x: [T, H, P]. steps: [T, H]. bias, a_log, skip: float32 [H]. b, c: [T, G, N]; H is a multiple of
    G, and the heads of a group share them. state: h, float32 [blocks, H, P, N].
    """
    dt = softplus(steps.float() + bias).clamp(*limits)
    a = -a_log.exp()
    repeats = x.shape[1] // b.shape[1]
    wide = x.float()
    b = b.float().repeat_interleave(repeats, 1)
    c = c.float().repeat_interleave(repeats, 1)
    out = wide * skip.float().unsqueeze(-1)
    tokens, blocks, is_new = _single(rows)
    if len(blocks):
        h = state[blocks].masked_fill(is_new[:, None, None, None], 0)
        step = dt[tokens]
        h = h * torch.exp(step * a)[..., None, None]
        h = h + (step.unsqueeze(-1) * wide[tokens]).unsqueeze(-1) * b[tokens].unsqueeze(2)
        out[tokens] += (h @ c[tokens].unsqueeze(-1)).squeeze(-1)
        _store(h, state, blocks, rows)
    for tokens, block, new in rows.longer():
        h = state[block][0].masked_fill(new, 0)
        for start in range(tokens.start, tokens.stop, CHUNK):
            part = slice(start, min(start + CHUNK, tokens.stop))
            part_out, h = _chunk(wide[part], dt[part], a, b[part], c[part], h)
            out[part] += part_out
        state[block] = h
    return out.to(x.dtype)


def _chunk(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y [L, H, P] without skip, the state after it) of L tokens: each reads the tokens
    before it, through one matrix of decays per head, and the state before the chunk."""
    decay = (dt * a).cumsum(0).T  # [H, L], the logarithm of what is left of the state
    between = (decay.unsqueeze(2) - decay.unsqueeze(1)).tril().exp().tril()
    scores = torch.einsum("ihn,jhn->hij", c, b) * between * dt.T.unsqueeze(1)
    y = torch.einsum("hij,jhp->ihp", scores, x) + torch.einsum(
        "ihn,hpn,hi->ihp", c, state, decay.exp()
    )
    left = (decay[:, -1:] - decay).exp() * dt.T
    return y, state * decay[:, -1, None, None].exp() + torch.einsum("hj,jhp,jhn->hpn", left, x, b)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Tensor,
    bias: Tensor,
    a_log: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """Linear attention that replaces what a key had stored: S ← S exp(g), S ← S + b (v - S k) kᵀ, y
    = S q. → y [T, H, P], type of v. q and k are divided by their lengths, q also by √K, b =
    sigmoid(beta), g = -exp(a_log) softplus(steps + bias).

    Yang et al. 2024, "Gated delta networks": steps [T, H], bias [H]. Kimi Team 2025, "Kimi Linear":
    steps [T, H, K], bias [H, K], a decay per channel. q, k: [T, G, K]; H is a multiple of G. v: [T,
    H, P]. a_log: float32 [H]. beta: [T, H]. state: S, float32 [blocks, H, P, K].
    """
    repeats = v.shape[1] // k.shape[1]
    q, k = (_unit(x.float()).repeat_interleave(repeats, 1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    wide = v.float()
    beta = beta.float().sigmoid().unsqueeze(-1)
    decay = softplus(steps.float() + bias).view(*v.shape[:2], -1) * -a_log.exp().unsqueeze(-1)
    out = torch.zeros_like(wide)
    tokens, blocks, is_new = _single(rows)
    if len(blocks):
        h = state[blocks].masked_fill(is_new[:, None, None, None], 0) * decay[
            tokens
        ].exp().unsqueeze(2)
        recalled = (h @ k[tokens].unsqueeze(-1)).squeeze(-1)
        h = h + (beta[tokens] * (wide[tokens] - recalled)).unsqueeze(-1) * k[tokens].unsqueeze(2)
        out[tokens] = (h @ q[tokens].unsqueeze(-1)).squeeze(-1)
        _store(h, state, blocks, rows)
    for tokens, block, new in rows.longer():
        h = state[block][0].masked_fill(new, 0)
        for start in range(tokens.start, tokens.stop, DELTA_CHUNK):
            part = slice(start, min(start + DELTA_CHUNK, tokens.stop))
            out[part], h = _delta_chunk(q[part], k[part], wide[part], decay[part], beta[part], h)
        state[block] = h
    return out.to(v.dtype)


def wkv(
    k: Tensor, v: Tensor, decay: Tensor, first: Tensor, state: Tensor, rows: StateRows
) -> Tensor:
    """The mean of values of RWKV-4 (Peng et al. 2023, equation 16): token i has the weight exp(kᵢ +
    (t - 1 - i) decay) at a later token t, and exp(kₜ + first) at its own. → [T, C], type of v.

    k, v: [T, C]. decay: negative, first: float32 [C]. state: float32 [blocks, C, 3]: the weighted
    sum of the values, the sum of the weights, both divided by exp(m), and m.
    """
    key = k.float()
    wide = v.float()
    out = torch.zeros_like(wide)
    tokens, blocks, is_new = _single(rows)
    if len(blocks):
        past = _past_sums(state[blocks], is_new[:, None])
        exponent = key[tokens]
        new = torch.stack((wide[tokens], torch.ones_like(wide[tokens])), -1)
        total = _add_sums(past, new, exponent + first)
        out[tokens] = total[..., 0] / total[..., 1]
        past[..., 2] += decay
        _store(_add_sums(past, new, exponent), state, blocks, rows)
    for tokens, block, is_new in rows.longer():
        past = _past_sums(state[block], is_new[:, None])[0]
        for start in range(tokens.start, tokens.stop, WKV_CHUNK):
            part = slice(start, min(start + WKV_CHUNK, tokens.stop))
            out[part], past = _wkv_chunk(key[part], wide[part], decay, first, past)
        state[block] = past
    return out.to(v.dtype)


def _past_sums(past: Tensor, is_new: Tensor) -> Tensor:
    """Return the sums before a step, [..., C, 3]. Those of a new row are zero, whatever m is."""
    least = past.new_tensor([0.0, 0.0, NOTHING])
    return torch.where(is_new.unsqueeze(-1), least, past)


def _add_sums(past: Tensor, new: Tensor, exponent: Tensor) -> Tensor:
    """Return the sums [..., C, 3] with exp(exponent) · new, [..., C, 2]."""
    m = torch.maximum(past[..., 2], exponent)
    old = (past[..., 2] - m).exp().unsqueeze(-1) * past[..., :2]
    return torch.cat((old + (exponent - m).exp().unsqueeze(-1) * new, m.unsqueeze(-1)), -1)


def _wkv_chunk(
    k: Tensor, v: Tensor, decay: Tensor, first: Tensor, past: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (the means [L, C], the sums [C, 3] after them) of L tokens. The weights of all pairs
    of tokens are computed, with the sums before the chunk as one more token."""
    length = len(k)
    times = torch.arange(length, device=k.device)
    gaps = times.unsqueeze(1) - 1 - times
    exponents = k + gaps.unsqueeze(-1) * decay  # [L, L, C]
    exponents = torch.where((gaps < 0).unsqueeze(-1), -torch.inf, exponents)
    exponents[times, times] = k + first
    before = past[:, 2] + times.unsqueeze(-1) * decay
    exponents = torch.cat((before.unsqueeze(1), exponents), 1)
    weights = (exponents - exponents.amax(1, keepdim=True)).exp()
    sums = torch.cat((past[:, :2].unsqueeze(0), torch.stack((v, torch.ones_like(v)), -1)))
    totals = torch.einsum("tic,icn->tcn", weights, sums)
    last = torch.cat((past[None, :, 2] + length * decay, k + (length - 1 - times)[:, None] * decay))
    m = last.amax(0)
    after = torch.einsum("ic,icn->cn", (last - m).exp(), sums)
    return totals[..., 0] / totals[..., 1], torch.cat((after, m.unsqueeze(-1)), -1)


def _single(rows: StateRows) -> tuple[Tensor | slice, Tensor, Tensor]:
    """Return `StateRows.single`. In a padded step, only rows without drafts have one token each."""
    if rows.starts is None and rows.table.shape[1] > 1:
        raise CannotRecord("the reference of an op with states cannot replay drafts")
    return rows.single


def _store(new: Tensor, state: Tensor, blocks: Tensor, rows: StateRows) -> None:
    """Write the states of the rows of one token. Several rows that repeat the first one write the
    same; if this has no token either, the states stay as they are."""
    if rows.starts is None:
        new = torch.where(rows.seq_lens[0] > 0, new, state[blocks])
    state[blocks] = new


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (y [L, H, P], the state after it) of L tokens. What each token adds, u kᵀ, depends on
    what those before it added: (I + A) u = b (v - S k), where A is strictly lower triangular (Yang
    et al. 2024, section 3.3). decay: logarithms [L, H, 1 or K]."""
    decay = decay.cumsum(0)
    is_past = torch.ones(len(k), len(k), dtype=torch.bool, device=k.device).tril()[..., None, None]
    # [L, L, H, K]
    between = (decay.unsqueeze(1) - decay.unsqueeze(0)).masked_fill(~is_past, -torch.inf).exp() * k
    added = torch.einsum("ihk,ijhk->hij", beta * k, between).tril(-1)
    scores = torch.einsum("ihk,ijhk->hij", q, between)
    left = decay.exp()
    wanted = beta * (v - torch.einsum("ihk,hpk->ihp", k * left, state))
    u = torch.linalg.solve_triangular(
        added, wanted.transpose(0, 1), upper=False, unitriangular=True
    )
    y = torch.einsum("ihk,hpk->ihp", q * left, state) + (scores @ u).transpose(0, 1)
    last = (decay[-1] - decay).exp() * k
    return y, state * left[-1].unsqueeze(1) + torch.einsum("hjp,jhk->hpk", u, last)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, size: int, gates_first: bool
) -> Tensor:
    """x silu(gate), normalized by the root mean square of every `size` channels: x, gate [T, n] →
    [T, n], type of x.

    weight: factors of the normalized channels, [n], or [size] if all parts have the same; None = do
    not normalize. gates_first: normalize after the gate (Mamba-2); otherwise before it (Falcon-H1,
    gated delta networks).
    """
    wide = x.float()
    gate = silu(gate.float())
    if weight is None:
        return (wide * gate).to(x.dtype)
    parts = (wide * gate if gates_first else wide).unflatten(-1, (-1, size))
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    normalized = (parts * weight.float().view(-1, size)).flatten(1)
    return (normalized if gates_first else normalized * gate).to(x.dtype)
