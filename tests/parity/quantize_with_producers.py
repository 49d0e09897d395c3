"""Quantizes a small Llama with the packages that produce such checkpoints.

    python quantize_with_producers.py FOLDER

It runs in an environment with torch, transformers and any of llmcompressor, nvidia-modelopt,
auto-round and amd-quark, without Pegboard. FOLDER gets "plain", the checkpoint that is quantized,
for each case a folder with the checkpoint as the producer writes it, and "CASE.safetensors", the
weights that the producer computes with. What is not installed is told and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
STORED = {
    "FP8_DEFAULT_CFG": ("FP8", 0),
    "NVFP4_DEFAULT_CFG": ("NVFP4", 16),
    "MXFP4_DEFAULT_CFG": ("MXFP4", 32),
}
FLOATS_OF_AUTO_ROUND = ("MXFP4", "MXFP8", "FPW8A16", "MXINT4")
"""Schemes that need no calibration."""
Written = tuple[str, dict[str, Tensor]]
"""A folder, and the weights by module that differ from those of the plain model."""


def plain(folder: Path) -> Any:
    """Returns a new copy of the plain model."""
    return AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()


def write_plain(folder: Path) -> None:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **SIZES), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.copy_(
                torch.randn(parameter.shape)
                * (0.3 if "embed" in name else 1.2 / parameter.shape[1] ** 0.5)
            )
    model.save_pretrained(folder / "plain")


def with_llmcompressor(folder: Path) -> Iterator[Written]:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    for scheme in (
        "W4A16",
        "W4A16_ASYM",
        "W8A16",
        "W8A8",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
        "NVFP4A16",
        "MXFP4A16",
    ):
        model = plain(folder)
        name = f"llmcompressor {scheme}"
        oneshot(
            model=model,
            recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]),
        )
        weights = {}
        for path, layer in model.named_modules():
            if (found := getattr(layer, "quantization_scheme", None)) is not None and getattr(
                layer, "weight", None
            ) is not None:
                names = {
                    "scale": "weight_scale",
                    "zero_point": "weight_zero_point",
                    "global_scale": "weight_global_scale",
                }
                given = {key: getattr(layer, own, None) for key, own in names.items()}
                weights[path] = fake_quantize(layer.weight, args=found.weights, **given).float()
        model.save_pretrained(folder / name, save_compressed=True)
        yield name, weights


def with_modelopt(folder: Path) -> Iterator[Written]:
    """An export changes scales after they were chosen: merged layers share them. So the stored
    weights are dequantized by the package, with one exception: it cannot dequantize what it writes
    for AWQ."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, NVFP4QTensor

    ids = torch.arange(3, 99).view(2, -1)
    for scheme in ("FP8_DEFAULT_CFG", "INT4_AWQ_CFG", "NVFP4_DEFAULT_CFG", "MXFP4_DEFAULT_CFG"):
        model = mtq.quantize(plain(folder), getattr(mtq, scheme), lambda model: model(ids))
        name = f"modelopt {scheme}"
        layers = {
            path: layer
            for path, layer in model.named_modules()
            if hasattr(layer, "weight_quantizer")
        }
        layers = {
            path: layer for path, layer in layers.items() if layer.weight_quantizer.is_enabled
        }
        weights: dict[str, Tensor] = {}
        if scheme not in STORED:
            for path, layer in layers.items():
                factors = getattr(layer.input_quantizer, "pre_quant_scale", None)
                weights[path] = layer.weight_quantizer(layer.weight).float() * (
                    1.0 if factors is None else factors.float()
                )
        shapes = {path: layer.weight.shape for path, layer in layers.items()}
        export_hf_checkpoint(model, export_dir=folder / name)
        if scheme in STORED:
            stored = load_file(folder / name / "model.safetensors")
            (kind, block) = STORED[scheme]
            for path, shape in shapes.items():
                kinds = {"FP8": FP8QTensor, "NVFP4": NVFP4QTensor, "MXFP4": MXFP4QTensor}
                scales = {
                    "scale": stored[f"{path}.weight_scale"],
                    "double_scale": stored.get(f"{path}.weight_scale_2"),
                }
                packed = kinds[kind](shape, torch.float32, stored[f"{path}.weight"])
                weights[path] = packed.dequantize(
                    torch.float32, **scales, block_sizes={-1: block} if block else None
                )
        yield name, weights


def with_auto_round(folder: Path) -> Iterator[Written]:
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel(
        {f"t{number}": number for number in range(SIZES["vocab_size"])}, unk_token="t0"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    integers = [("W4A16", form) for form in ("auto_gptq", "auto_awq", "auto_round")]
    for scheme, form in [*integers, *((each, "auto_round") for each in FLOATS_OF_AUTO_ROUND)]:
        settings = {"group_size": 32} if scheme == "W4A16" else {}
        rounder = AutoRound(
            plain(folder), tokenizer, scheme=scheme, iters=0, disable_opt_rtn=True, **settings
        )
        model, _ = rounder.quantize()
        weights = {
            path.removesuffix(".orig_layer"): layer.weight.detach().float().clone()
            for path, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and path != "lm_head"
        }
        name = f"auto-round {form if scheme == 'W4A16' else scheme}"
        rounder.save_quantized(str(folder / name), format=form)
        yield name, weights


def with_quark(folder: Path) -> Iterator[Written]:
    """int8 with static activations, FP8 and MXFP4."""
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as quark

    int8 = {"is_dynamic": False, "symmetric": True, "round_method": "half_even"}
    int8 |= {"observer_method": "min_max", "scale_type": "float"}
    inputs = quark.Int8PerTensorSpec(**int8).to_quantization_spec()
    float8 = quark.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False)
    rows = quark.Int8PerChannelSpec(
        ch_axis=0, **{name: value for name, value in int8.items() if name != "observer_method"}
    )
    cases = {
        "INT8": (rows, inputs),
        "FP8": (float8, float8.to_quantization_spec()),
        "MXFP4": (quark.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False), None),
    }
    ids = torch.arange(3, 99).view(2, -1)
    for scheme, (spec, input_tensors) in cases.items():
        layer_config = quark.QLayerConfig(
            weight=spec.to_quantization_spec(), input_tensors=input_tensors
        )
        quantizer = ModelQuantizer(
            quark.QConfig(global_quant_config=layer_config, exclude=["lm_head"])
        )
        batches = torch.utils.data.DataLoader(list(ids), batch_size=1)
        model = quantizer.freeze(quantizer.quantize_model(plain(folder), batches))
        weights = {
            path: layer.get_quant_weight(layer.weight).detach().float().clone()
            for path, layer in model.named_modules()
            if hasattr(layer, "get_quant_weight") and path != "lm_head"
        }
        name = f"quark {scheme}"
        with torch.no_grad():
            export_safetensors(model, str(folder / name), custom_mode="quark")
        yield name, weights


def main(folder: Path) -> None:
    write_plain(folder)
    tensors = {name: value.float() for name, value in plain(folder).state_dict().items()}
    for produce in (with_llmcompressor, with_modelopt, with_auto_round, with_quark):
        try:
            for name, weights in produce(folder):
                whole = tensors | {
                    f"{path}.weight": weight.detach() for path, weight in weights.items()
                }
                save_file(
                    {key: value.contiguous() for key, value in whole.items()},
                    folder / f"{name}.safetensors",
                )
        except ImportError as error:
            print(f"{produce.__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
