"""ggml blocks → floats, in torch. Source of the block layouts: ggml-common.h; the tests compare
with gguf.quants.

Common types are written out here, working in place on a cache-sized run of blocks at a time; the
rare ones (IQ*, TQ*, FP4) go through `gguf.quants`. A decoder gets `blocks` [n, block_bytes] uint8
and `out` [n, block_size] float32, which it fills. Sums and products are rounded one by one in the
order gguf.quants uses, so that results are equal bit by bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from pegboard_pack_gguf.ggml_types import BY_STORED

Decoder = Callable[[Tensor, Tensor], None]

CHUNK_ELEMENTS = 1 << 18
"""The number of elements that are decoded at a time. Their float32 form and its temporaries stay in
the second-level cache."""


def dequantize_into(data: memoryview, stored: str, out: Tensor) -> None:
    """Decode all of `data`, blocks of type `stored`, into `out`: contiguous, any float dtype, any
    device, rows of whole blocks. The elements are in logical order."""
    ggml_type = BY_STORED[stored]
    decode = DECODERS.get(ggml_type.name) or _from_package(ggml_type.name)
    rows = out.view(-1, out.shape[-1])
    num_rows, width = rows.shape
    row_bytes = ggml_type.num_bytes(width)
    assert len(data) == num_rows * row_bytes, (len(data), num_rows, row_bytes)
    step = max(1, CHUNK_ELEMENTS // width)
    scratch = (
        None
        if out.dtype == torch.float32
        else torch.empty(min(step, num_rows), width, device=out.device)
    )
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        blocks = (
            _as_tensor(data[start * row_bytes : stop * row_bytes])
            .to(out.device)
            .view(-1, ggml_type.block_bytes)
        )
        target = rows[start:stop] if scratch is None else scratch[: stop - start]
        decode(blocks, target.view(-1, ggml_type.block_size))
        if scratch is not None:
            rows[start:stop].copy_(target)


def _as_tensor(data: memoryview) -> Tensor:
    """Returns a uint8 tensor over read-only memory. Suppresses torch's warning that it cannot
    prevent writes."""
    if not data.readonly:
        return torch.frombuffer(data, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8)


def _half(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Returns `count` float16 numbers from byte `start` of each block, as float32 [n, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Splits bytes into low halves first, then high halves: packed [n, k] → out [n, 2, k], any
    dtype."""
    out[:, 0].copy_(packed & 15)
    out[:, 1].copy_(packed >> 4)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    scales = _half(blocks, 0, 2)
    _nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(scales[:, :1]).add_(scales[:, 1:])


def _fifth_bits(packed: Tensor) -> Tensor:
    """Returns the bits 0…31 of four bytes, as 16 or 0: [n, 4] → [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1) << 4


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out.view(-1, 2, 16))
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    scales = _half(blocks, 0, 2)
    _nibbles(blocks[:, 8:], out.view(-1, 2, 16))
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _planes(packed: Tensor, width: int, bits: int) -> Tensor:
    """Splits numbers of `bits` bits. Each run of `width` bytes holds all lowest parts, then all
    next parts, and so on: [n, k] → [n, 8k/bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    mask = (1 << bits) - 1
    return ((packed.reshape(len(packed), -1, 1, width) >> shifts) & mask).flatten(1)


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    scales = blocks[:, :16]
    halves = _half(blocks, 80, 2)
    by_16 = out.view(-1, 16, 16)
    out.copy_(_planes(blocks[:, 16:80], 32, 2))
    by_16.mul_((halves[:, :1] * (scales & 15)).unsqueeze(-1)).sub_(
        (halves[:, 1:] * (scales >> 4)).unsqueeze(-1)
    )


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    """The third bit is stored inverted: where it is clear, 4 is subtracted. The scales are 16
    six-bit numbers minus 32."""
    packed = blocks[:, 96:108]
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), 1)
    scales = (low | (_planes(packed[:, 8:], 4, 2) << 4)).float() - 32
    out.copy_(_planes(blocks[:, 32:96], 32, 2)).add_(_planes(blocks[:, :32], 32, 1) << 2).sub_(4)
    out.view(-1, 16, 16).mul_((_half(blocks, 108) * scales).unsqueeze(-1))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Splits eight scales and eight minima of six bits, which are stored in twelve bytes. The first
    four of each are in the low bits of bytes 0-3 and 4-7. The last four take four bits from bytes
    8-11 and their top two from bytes 0-3 and 4-7."""
    first = packed[:, :4]
    second = packed[:, 4:8]
    third = packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), 1)
    return scales, minima


def _scale_by_32(blocks: Tensor, out: Tensor) -> None:
    """The common last part of Q4_K and Q5_K: value * (d * scale) - (dmin * minimum) for each of
    eight runs of 32."""
    scales, minima = _k_scales(blocks[:, 4:16])
    halves = _half(blocks, 0, 2)
    by_32 = out.view(-1, 8, 32)
    by_32.mul_((halves[:, :1] * scales).unsqueeze(-1)).sub_((halves[:, 1:] * minima).unsqueeze(-1))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_planes(blocks[:, 16:], 32, 4))
    _scale_by_32(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_planes(blocks[:, 48:], 32, 4)).add_(_planes(blocks[:, 16:48], 32, 1) << 4)
    _scale_by_32(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    out.copy_(_planes(blocks[:, :128], 64, 4)).add_(_planes(blocks[:, 128:192], 32, 2) << 4).sub_(
        32
    )
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1))


def _q8_k(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 4:260].contiguous().view(torch.int8)).mul_(
        blocks[:, :4].contiguous().view(torch.float32)
    )


def _q1_0(blocks: Tensor, out: Tensor) -> None:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    out.copy_(((blocks[:, 2:].unsqueeze(-1) >> shifts) & 1).flatten(1)).mul_(2).sub_(1).mul_(
        _half(blocks, 0)
    )


def _from_package(name: str) -> Decoder:
    """Decodes with gguf.quants, which works in numpy, on the CPU."""
    import gguf
    import numpy as np

    number = gguf.GGMLQuantizationType[name]

    def decode(blocks: Tensor, out: Tensor) -> None:
        values = gguf.quants.dequantize(blocks.cpu().numpy(), number)
        out.copy_(torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(out.shape))

    return decode


DECODERS: dict[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
    "Q1_0": _q1_0,
}
