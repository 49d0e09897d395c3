"""Quantizes a small Llama with the packages that produce such checkpoints.

    python quantize_with_producers.py FOLDER

It runs in an environment with torch, transformers and any of llmcompressor, nvidia-modelopt and
auto-round, without Pegboard. FOLDER gets "plain", the checkpoint that is quantized, for each case a
folder with the checkpoint as the producer writes it, and "CASE.safetensors", the weights that the
producer computes with. What is not installed is told and left out.
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
    for form in ("auto_gptq", "auto_awq", "auto_round"):
        rounder = AutoRound(
            plain(folder), tokenizer, scheme="W4A16", iters=0, group_size=32, disable_opt_rtn=True
        )
        model, _ = rounder.quantize()
        weights = {
            path: layer.weight.detach().float().clone()
            for path, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and path != "lm_head"
        }
        rounder.save_quantized(str(folder / f"auto-round {form}"), format=form)
        yield f"auto-round {form}", weights


def main(folder: Path) -> None:
    write_plain(folder)
    tensors = {name: value.float() for name, value in plain(folder).state_dict().items()}
    for produce in (with_llmcompressor, with_modelopt, with_auto_round):
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
