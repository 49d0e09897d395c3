"""Writes the checkpoint of a tiny model again in the common formats, tensor by tensor as the
formats define them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pegboard_testing.layouts import bit_stream as stream

GROUP = 32
LINEAR = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    ".w1",
    ".w2",
    ".w3",
)
"""Ends of the names of modules that are quantized. Routers are not, also where no config says
so."""


def rounded(
    weight: Tensor, bits: int, group: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Round with a scale and a zero point per row and group of columns. Returns codes, zeros,
    scales and the values."""
    values = weight.numpy()
    count = int(group.max()) + 1
    low = np.stack([values[:, group == g].min(1) for g in range(count)], 1).clip(max=0)
    high = np.stack([values[:, group == g].max(1) for g in range(count)], 1).clip(min=0)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.round(-low / wide), 1, 2**bits - 1).astype(np.int64)
    codes = np.clip(np.round(values / wide[:, group]) + zeros[:, group], 0, 2**bits - 1).astype(
        np.int64
    )
    return (
        codes,
        zeros,
        scales,
        torch.from_numpy((codes - zeros[:, group]).astype(np.float32) * wide[:, group]),
    )


def as_awq(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, values = rounded(weight, 4, np.arange(weight.shape[1]) // GROUP)
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(rows: np.ndarray) -> Tensor:  # eight rows of the weight in a word
        return stream(
            rows.reshape(-1, 8, rows.shape[1])[:, places].reshape(rows.shape), 4
        ).T.contiguous()

    return {
        "qweight": words(codes),
        "qzeros": words(zeros),
        "scales": torch.from_numpy(scales.T.copy()),
    }, values


def as_gptq(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    group = np.arange(weight.shape[1]) // GROUP
    if order:
        group = np.random.default_rng(weight.shape[1]).permutation(group)
    codes, zeros, scales, values = rounded(weight, bits, group)
    tensors = {
        "qweight": stream(codes.T, bits),
        "qzeros": stream(zeros - 1, bits).T.contiguous(),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(group.astype(np.int32)),
    }
    return tensors, values


def as_compressed(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """pack-quantized with zero points."""
    group = np.arange(weight.shape[1]) // GROUP
    if order:
        group = np.random.default_rng(weight.shape[1]).permutation(group)
    codes, zeros, scales, values = rounded(weight, bits, group)
    tensors = {
        "weight_packed": stream(codes.T, bits).T.contiguous(),
        "weight_zero_point": stream(zeros, bits),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    return (tensors | {"weight_g_idx": torch.from_numpy(group)} if order else tensors), values


def as_bytes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round to int8 with a scale per row. Returns codes, scales [rows, 1] and the values."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).float()
    codes = (weight / scales).round().clamp(-127, 127)
    return codes.to(torch.int8), scales, codes * scales


def as_w8a8(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, values = as_bytes(weight)
    return {"weight": codes, "weight_scale": scales}, values


def as_float8(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def as_fp8(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {
        "weight": codes,
        "weight_scale": scale,
        "input_scale": torch.tensor(0.1),
    }, codes.float() * scale


def as_fp8_blocks(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Of 32 rows and columns."""
    rows, columns = (size // 32 for size in weight.shape)
    blocks = weight.view(rows, 32, columns, 32)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scales[:, None, :, None]).view(weight.shape)
    return {"weight": codes.view(weight.shape), "weight_scale_inv": scales}, values


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_fp4(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Round to FP4 with a scale per row and group of columns. Returns the bytes and the values."""
    groups = weight.view(*scales.shape, -1) / scales.unsqueeze(2)
    codes = (groups.unsqueeze(-1) - FP4).abs().argmin(-1)
    values = (FP4[codes] * scales.unsqueeze(2)).view(weight.shape)
    codes = codes.view(weight.shape)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), values


def as_nvfp4(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    whole = weight.abs().amax() / (6 * 448)
    scales = (weight.view(weight.shape[0], -1, 16).abs().amax(2) / 6 / whole).to(
        torch.float8_e4m3fn
    )
    packed, values = in_fp4(weight, scales.float() * whole)
    return {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.1),
    }, values


def as_mxfp4(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    exponents = (weight.view(weight.shape[0], -1, 32).abs().amax(2).log2().floor() - 2 + 127).to(
        torch.uint8
    )
    packed, values = in_fp4(weight, 2.0 ** (exponents.float() - 127))
    return {"weight_blocks": packed.view(*exponents.shape, 16), "weight_scales": exponents}, values


def hadamard() -> Tensor:
    """Return Sylvester's matrix of 32 columns, divided by √32."""
    matrix = torch.ones(1, 1)
    for _ in range(5):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5, matrix)
    return matrix


def as_turned_w8a8(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """For inputs that are multiplied by a Hadamard matrix, which the config names."""
    matrix = hadamard()
    tensors, values = as_w8a8((weight.view(-1, 32) @ matrix).view(weight.shape), bits, order)
    return tensors, (values.view(-1, 32) @ matrix.T).view(weight.shape)


def as_signed_w8a8(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """For inputs that are multiplied by a stored Hadamard matrix whose rows have signs."""
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0] * 8).unsqueeze(1)
    matrix = signs * hadamard()
    tensors, values = as_w8a8((weight.view(-1, 32) @ matrix).view(weight.shape), bits, order)
    stored = {"u_input.weight": (matrix * 32**0.5).round()}
    return tensors | stored, (values.view(-1, 32) @ matrix.T).view(weight.shape)


def as_fp_quant(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """MXFP4, for inputs that are multiplied by a Hadamard matrix."""
    matrix = hadamard()
    turned = (weight.view(-1, 32) @ matrix).view(weight.shape)
    exponents = (turned.view(weight.shape[0], -1, 32).abs().amax(2).log2().floor() - 1 + 127).to(
        torch.uint8
    )
    packed, values = in_fp4(turned, 2.0 ** (exponents.float() - 127) / 3)
    tensors = {"qweight": packed, "scales": exponents, "weight_global_scale": torch.tensor([3.0])}
    return tensors | {"forward_hadamard_matrix": matrix}, (values.view(-1, 32) @ matrix.T).view(
        weight.shape
    )


def as_nvfp4_awq(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    scale = torch.linspace(0.5, 2, weight.shape[1])
    tensors, values = as_nvfp4(weight / scale, bits, order)
    return tensors | {"pre_quant_scale": scale}, values * scale


def as_nf4(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """With quantized scales, as bitsandbytes stores them for double quantization. Blocks of 64
    reach into the next row."""
    table = torch.tensor(
        [-1, -0.7, -0.52, -0.4, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1]
    )
    nested_table = torch.linspace(-1, 1, 256)
    offset = 0.25
    blocks = weight.reshape(-1, 64)
    spread = float((blocks.abs().amax(1) - offset).abs().amax())
    absmax_codes = (
        ((blocks.abs().amax(1) - offset) / spread * 127.5 + 127.5)
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
    )
    absmax = nested_table[absmax_codes.int()] * spread + offset
    codes = (
        ((blocks / absmax.unsqueeze(1)).unsqueeze(-1) - table)
        .abs()
        .argmin(-1)
        .to(torch.uint8)
        .flatten()
    )
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).unsqueeze(1),
        "weight.absmax": absmax_codes,
        "weight.quant_map": table,
        "weight.nested_absmax": torch.full((-(-len(absmax) // 256),), spread),
        "weight.nested_quant_map": nested_table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return tensors, (table[codes.int()].view(-1, 64) * absmax.unsqueeze(1)).view(weight.shape)


def as_hqq(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, values = rounded(weight, bits, np.arange(weight.shape[1]) // GROUP)
    groups = torch.from_numpy(codes.astype(np.uint8)).view(-1, GROUP)
    half = len(groups) // 2
    tensors = {
        "W_q": groups[:half] << 4 | groups[half:],
        "scale": torch.from_numpy(scales).view(-1, 1),
        "zero": torch.from_numpy(zeros.astype(np.float16)).view(-1, 1),
    }
    return tensors, values


def as_torchao(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, values = as_bytes(weight)
    return {"_weight_qdata": codes, "_weight_scale": scales}, values


def of_groups(format: str, strategy: str, **weights: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors with one group."""
    weights = {
        "type": "int",
        "strategy": strategy,
        "group_size": GROUP if strategy == "group" else None,
        **weights,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def classic(method: str, bits: int, order: bool = False) -> dict[str, Any]:
    return {
        "quant_method": method,
        "bits": bits,
        "group_size": GROUP,
        "desc_act": order,
        "zero_point": True,
        "version": "gemm",
    }


Store = Callable[[Tensor, int, bool], tuple[dict[str, Tensor], Tensor]]
CASES: dict[str, tuple[dict[str, Any], Store, int, bool]] = {
    "awq": (classic("awq", 4), as_awq, 4, False),
    "gptq": (classic("gptq", 4), as_gptq, 4, False),
    "gptq in act order": (classic("gptq", 4, True), as_gptq, 4, True),
    "gptq with 8 bits": (classic("gptq", 8, True), as_gptq, 8, True),
    "gptq with 3 bits": (classic("gptq", 3), as_gptq, 3, False),
    "gptq with 2 bits": (classic("gptq", 2), as_gptq, 2, False),
    "auto-round": (
        {**classic("auto-round", 4), "packing_format": "auto_round:auto_awq"},
        as_awq,
        4,
        False,
    ),
    "pack-quantized": (
        of_groups("pack-quantized", "group", num_bits=4, symmetric=False),
        as_compressed,
        4,
        False,
    ),
    "pack-quantized in act order": (
        of_groups("pack-quantized", "group", num_bits=4, symmetric=False),
        as_compressed,
        4,
        True,
    ),
    "int-quantized": (of_groups("int-quantized", "channel", num_bits=8), as_w8a8, 8, False),
    "int-quantized, turned": (
        {
            **of_groups("int-quantized", "channel", num_bits=8),
            "transform_config": {
                "config_groups": {
                    "u": {
                        "type": "hadamard",
                        "block_size": 32,
                        "apply": [
                            {"targets": ["Linear"], "location": "input", "ignore": ["lm_head"]}
                        ],
                    }
                }
            },
        },
        as_turned_w8a8,
        8,
        False,
    ),
    "int-quantized, turned with signs": (
        {
            **of_groups("int-quantized", "channel", num_bits=8),
            "transform_config": {
                "config_groups": {
                    "u": {
                        "type": "random-hadamard",
                        "block_size": 32,
                        "apply": [
                            {"targets": ["Linear"], "location": "input", "ignore": ["lm_head"]}
                        ],
                    }
                }
            },
        },
        as_signed_w8a8,
        8,
        False,
    ),
    "float-quantized": (
        of_groups("float-quantized", "channel", num_bits=8, type="float"),
        as_float8,
        8,
        False,
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, as_fp8, 8, False),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        as_fp8_blocks,
        8,
        False,
    ),
    "modelopt": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
        as_fp8,
        8,
        False,
    ),
    "modelopt_fp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        as_nvfp4,
        4,
        False,
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, as_mxfp4, 4, False),
    "fp_quant": (
        {"quant_method": "fp_quant", "forward_dtype": "mxfp4", "hadamard_group_size": 32},
        as_fp_quant,
        4,
        False,
    ),
    "modelopt awq": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "ignore": ["lm_head"]},
        as_nvfp4_awq,
        4,
        False,
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, as_nf4, 4, False),
}
CASES |= {
    "awq next to plain parts": (
        {**classic("awq", 4), "modules_to_not_convert": ["k_proj", "up_proj"]},
        as_awq,
        4,
        False,
    ),
    "hqq": (
        {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": GROUP, "axis": 1}},
        },
        as_hqq,
        4,
        False,
    ),
    "torchao": (
        {"quant_method": "torchao", "modules_to_not_convert": ["lm_head"]},
        as_torchao,
        8,
        False,
    ),
    "quark": (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_channel"}},
            "exclude": ["lm_head"],
        },
        as_w8a8,
        8,
        False,
    ),
}
FLOATS = {
    "float-quantized",
    "fp8",
    "fp8 in blocks",
    "modelopt",
    "modelopt_fp4",
    "modelopt awq",
    "mxfp4",
    "fp_quant",
    "bitsandbytes",
}
"""Formats that are multiplied with activations as they are."""


def with_inputs(config: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors that asks for rounded activations."""
    (group,) = config["config_groups"].values()
    inputs = {"num_bits": 8, "symmetric": True, "strategy": "token", **inputs}
    return {**config, "config_groups": {"group_0": {**group, "input_activations": inputs}}}


def as_static_w8a8(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Merged layers have different scales."""
    tensors, values = as_w8a8(weight, bits, order)
    return {**tensors, "input_scale": torch.tensor([0.04 if len(weight) > 64 else 0.02])}, values


def as_shifted_w8a8(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """With a stored zero point of the activations."""
    tensors, values = as_w8a8(weight, bits, order)
    stored = {"input_scale": torch.tensor(0.04), "input_zero_point": torch.tensor(-9).int()}
    return {**tensors, **stored}, values


def as_large_fp8_blocks(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Of 128 rows and columns. Those of a last block may be fewer."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    whole = torch.nn.functional.pad(
        weight, (0, columns * 128 - weight.shape[1], 0, rows * 128 - weight.shape[0])
    )
    blocks = whole.view(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def rounded_to_int8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-127, 127) * scale


def spread_over_int8(x: Tensor) -> Tensor:
    """Round to 256 steps from the least to the largest value of a token."""
    low = x.amin(-1, keepdim=True).clamp(max=0)
    scale = (x.amax(-1, keepdim=True).clamp(min=0) - low) / 255
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, 255) - zero) * scale


def rounded_to_float8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def in_blocks(x: Tensor) -> Tensor:
    """Return the largest magnitudes of 128 columns, for each column."""
    largest = [part.abs().amax(-1, keepdim=True).expand_as(part) for part in x.split(128, -1)]
    return torch.cat(largest, -1)


_INT8 = of_groups("int-quantized", "channel", num_bits=8)
_INT4 = of_groups("pack-quantized", "group", num_bits=4, symmetric=False)
_FLOAT8 = of_groups("float-quantized", "channel", num_bits=8, type="float")
ROUNDED: dict[str, tuple[dict[str, Any], Store, int, bool]] = {
    "int8 per token": (with_inputs(_INT8, dynamic=True), as_w8a8, 8, False),
    "int8 per tensor": (
        with_inputs(_INT8, dynamic=False, strategy="tensor"),
        as_static_w8a8,
        8,
        False,
    ),
    "float8 per token": (with_inputs(_FLOAT8, dynamic=True, type="float"), as_float8, 8, False),
    "static fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, as_fp8, 8, False),
    "fp8 in groups": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        as_large_fp8_blocks,
        8,
        False,
    ),
    "int8 per token, weights in 4 bits": (
        with_inputs(_INT4, dynamic=True),
        as_compressed,
        4,
        False,
    ),
    "float8 per token, weights in 4 bits": (
        with_inputs(_INT4, dynamic=True, type="float"),
        as_compressed,
        4,
        False,
    ),
    "zero points": (with_inputs(_INT8, dynamic=True, symmetric=False), as_w8a8, 8, False),
    "modelopt per token": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        as_float8,
        8,
        False,
    ),
    "quark, a stored zero point": (
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "int8", "qscheme": "per_channel"},
                "input_tensors": {"dtype": "int8", "qscheme": "per_tensor", "symmetric": False},
            },
            "exclude": ["lm_head"],
        },
        as_shifted_w8a8,
        8,
        False,
    ),
    "torchao per token": (
        {
            "quant_method": "torchao",
            "quant_type": {
                "default": {"_type": "Int8DynamicActivationInt8WeightConfig", "_data": {}}
            },
            "modules_to_not_convert": ["lm_head"],
        },
        as_torchao,
        8,
        False,
    ),
}
"""Checkpoints that ask for rounded activations (W8A8, W4A8)."""
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8 per token": lambda x: rounded_to_int8(x, x.abs().amax(-1, keepdim=True) / 127),
    "int8 per tensor": lambda x: rounded_to_int8(x, torch.tensor(0.04)),
    "float8 per token": lambda x: rounded_to_float8(x, x.abs().amax(-1, keepdim=True) / 448),
    "static fp8": lambda x: rounded_to_float8(x, torch.tensor(0.1)),
    "fp8 in groups": lambda x: rounded_to_float8(x, in_blocks(x) / 448),
    "zero points": spread_over_int8,
    "quark, a stored zero point": lambda x: (((x / 0.04).round() - 9).clamp(-128, 127) + 9) * 0.04,
}
ROUNDINGS |= {
    "int8 per token, weights in 4 bits": ROUNDINGS["int8 per token"],
    "float8 per token, weights in 4 bits": ROUNDINGS["float8 per token"],
    "modelopt per token": ROUNDINGS["float8 per token"],
    "torchao per token": ROUNDINGS["int8 per token"],
}
"""What they ask for."""


def round_inputs(reference: Any, case: str) -> None:
    """Let the reference round what its quantized layers multiply."""
    for name, module in reference.model.named_modules():
        if name.endswith(LINEAR):
            module.register_forward_pre_hook(lambda _, given: (ROUNDINGS[case](given[0]),))


def quantize(
    reference: Any,
    case: str,
    auto: Any = AutoModelForCausalLM,
    part: str = "",
    linear: tuple[str, ...] = LINEAR,
) -> None:
    """Replaces the linear layers of the checkpoint by what a case makes of them, and the model by
    one with their values. auto: the class that reads it. part: of the names of layers to
    quantize. linear: the ends of these names."""
    config, store, bits, order = {**CASES, **ROUNDED}[case]
    path = reference.directory / "model.safetensors"
    stored = {}
    dense = {}
    plain = tuple(f"{name}.weight" for name in config.get("modules_to_not_convert", ()))
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        if part in name and module.endswith(linear) and not name.endswith(plain):
            tensors, dense[name] = store(tensor, bits, order)
            stored |= {f"{module}.{part}": value for part, value in tensors.items()}
        else:
            stored[name] = dense[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, path, {"format": "pt"})
    options: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference.model = auto.from_pretrained(reference.directory, **options).eval()
    save_file(stored, path, {"format": "pt"})
    if "producer" in config:
        (reference.directory / "hf_quant_config.json").write_text(json.dumps(config))
        return
    file = reference.directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))


def stack_experts(reference: Any) -> None:
    """Stores one tensor for all experts of a layer, with gate and up below each other:
    "experts.gate_up_proj" and "experts.gate_up_proj_scale_inv", [E, …]. transformers writes them
    so."""
    path = reference.directory / "model.safetensors"
    found: dict[str, dict[int, Tensor]] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in sorted(load_file(path).items()):  # gate comes before up
        before, _, after = name.partition(".experts.")
        if not after:
            kept[name] = tensor
            continue
        number, module, ending = after.split(".")
        merged = "gate_up_proj" if module in ("gate_proj", "up_proj") else module
        of_expert = found.setdefault(
            f"{before}.experts.{merged}{ending.removeprefix('weight')}", {}
        )
        of_expert[int(number)] = (
            torch.cat((of_expert[int(number)], tensor)) if int(number) in of_expert else tensor
        )
    kept |= {
        name: torch.stack([each[number] for number in sorted(each)]) for name, each in found.items()
    }
    save_file(kept, path, {"format": "pt"})


def store_experts_in_mxfp4(reference: Any) -> None:
    """Stores random experts as the published gpt-oss does: codes and powers of two, [experts, rows,
    blocks of 32 columns, 16 bytes]."""
    path = reference.directory / "model.safetensors"
    random = torch.Generator().manual_seed(11)
    tensors = load_file(path)
    held = reference.model.state_dict()
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = held[name].shape
        codes = torch.randint(0, 16, (count, rows, columns // 32, 32), generator=random)
        scales = torch.randint(121, 125, (count, rows, columns // 32), generator=random)
        matrix = levels[codes] * torch.exp2(scales - 127.0).unsqueeze(-1)
        held[name].copy_(matrix.flatten(2).transpose(1, 2))
        del tensors[name]
        tensors[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(tensors, path, {"format": "pt"})
    plain = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    path = reference.directory / "config.json"
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": quantization})
    )
