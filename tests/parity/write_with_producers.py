"""Writes quantized weights with the packages that produce such checkpoints, and what these packages
dequantize them to.

    python write_with_producers.py FOLDER

It runs in an environment with torch, safetensors and any of hqq, bitsandbytes, torchao and
compressed-tensors, without Pegboard. Each file has the tensors of a module "m" and "dequantized";
its metadata have the quantization config. What is not installed, or cannot quantize here, is told
and left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ROWS = 96
COLUMNS = 256
Case = tuple[str, dict[str, Any], dict[str, Tensor], Tensor]
"""Name, quantization config, tensors of the module, and the dequantized weight."""


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = (
        torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05
    ).to(dtype)
    return layer.to(dtype)


def of_hqq() -> Iterator[Case]:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for bits in (8, 4, 3, 2, 1):
        for axis in (0, 1):
            config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
            layer = HQQLinear(linear(), config, compute_dtype=torch.float32, device="cpu")
            tensors = {
                name: value
                for name, value in layer.state_dict().items()
                if isinstance(value, Tensor)
            }
            kept = {
                name: value
                for name, value in config.items()
                if value is None or isinstance(value, dict)
            }
            yield (
                f"hqq {bits} axis {axis}",
                {"quant_method": "hqq", "quant_config": kept},
                tensors,
                layer.dequantize(),
            )


def of_bitsandbytes() -> Iterator[Case]:
    from bitsandbytes import functional

    weight = linear(torch.float16).weight.data
    for kind in ("nf4", "fp4"):
        for is_nested in (False, True):
            packed, state = functional.quantize_4bit(
                weight, quant_type=kind, compress_statistics=is_nested
            )
            tensors = {"weight": packed} | {
                f"weight.{name}": value for name, value in state.as_dict(packed=True).items()
            }
            config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
            yield (
                f"bitsandbytes {kind} {is_nested}",
                config,
                tensors,
                functional.dequantize_4bit(packed, state),
            )
    codes, scales, _ = functional.int8_vectorwise_quant(weight)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    dequantized = functional.int8_vectorwise_dequant(codes, scales)
    yield "bitsandbytes int8", config, {"weight": codes, "SCB": scales}, dequantized


def of_torchao() -> Iterator[Case]:
    import torchao.quantization as quantization
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    cases = (
        "Int8WeightOnlyConfig",
        "Float8WeightOnlyConfig",
        "Int4WeightOnlyConfig",
        "IntxWeightOnlyConfig",
    )
    for name in (*cases, "Int8DynamicActivationIntxWeightConfig"):
        try:
            model = nn.Sequential(linear(torch.bfloat16))
            quantization.quantize_(model, getattr(quantization, name)())
        except ImportError as error:
            print(f"torchao {name}: {error}")
            continue
        weight = model[0].weight
        flat, _ = flatten_tensor_state_dict({"m.weight": weight})
        config = {"quant_method": "torchao", "quant_type": {"default": {"_type": name}}}
        yield (
            f"torchao {name}",
            config,
            {key.removeprefix("m."): data for key, data in flat.items()},
            weight.dequantize(),
        )


def of_compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        QuantizationStatus,
        initialize_module_for_quantization,
    )

    integers: dict[str, Any] = {"type": "int", "symmetric": True}
    floats: dict[str, Any] = {"type": "float", "num_bits": 8, "symmetric": True}
    group: dict[str, Any] = {"strategy": "group", "group_size": 32}
    cases: list[tuple[str, dict[str, Any]]] = [
        *(("pack-quantized", {**integers, **group, "num_bits": bits}) for bits in (4, 8)),
        ("pack-quantized", {**integers, **group, "num_bits": 4, "symmetric": False}),
        ("int-quantized", {**integers, "strategy": "channel", "num_bits": 8}),
        ("float-quantized", {**floats, "strategy": "channel"}),
        ("float-quantized", {**floats, "strategy": "tensor"}),
        *(
            (
                f"mxfp{bits}-{'' if bits == 8 else 'pack-'}quantized",
                {**floats, **group, "num_bits": bits, "scale_dtype": "torch.uint8"},
            )
            for bits in (4, 6, 8)
        ),
    ]
    for format, weights in cases:
        args = QuantizationArgs(**weights)
        layer = linear(torch.bfloat16)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
        initialize_module_for_quantization(layer, scheme)
        layer.quantization_status = QuantizationStatus.FROZEN
        _calibrate(layer, args)
        state = {name: value.data for name, value in layer.state_dict().items()}
        compressor = BaseCompressor.get_value_from_registry(format)
        tensors = compressor.compress(state, scheme)
        dequantized = compressor.decompress(tensors, scheme)["weight"]
        config = {"quant_method": "compressed-tensors", "format": format}
        config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
        name = f"compressed-tensors {format} {' '.join(str(value) for value in weights.values())}"
        yield name, config, tensors, dequantized


def _calibrate(layer: nn.Linear, args: Any) -> None:
    """Set the scales, and the zero points, that the ranges of the weights need."""
    from compressed_tensors.quantization.utils import calculate_qparams

    scale: Tensor = layer.weight_scale  # type: ignore[assignment]
    values = layer.weight.data.float().reshape(scale.numel(), -1)
    found, zero = calculate_qparams(values.amin(1), values.amax(1), args)
    scale.data.copy_(found.reshape(scale.shape))
    if not args.symmetric:
        layer.weight_zero_point.data.copy_(zero.reshape(scale.shape))  # type: ignore[union-attr, operator]


def main(folder: Path) -> None:
    for produce in (of_hqq, of_bitsandbytes, of_torchao, of_compressed_tensors):
        try:
            for name, config, tensors, dequantized in produce():
                stored = {
                    f"m.{key}": data.detach().contiguous()
                    for key, data in tensors.items()
                    if data is not None
                }
                stored["dequantized"] = dequantized.detach().reshape(ROWS, COLUMNS).contiguous()
                save_file(stored, folder / f"{name}.safetensors", {"config": json.dumps(config)})
        except ImportError as error:
            print(f"{produce.__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
