"""Measures what quantizing the default model costs in perplexity and greedy choices: each way to
quantize a plain checkpoint when it loads, and each type of the KV cache.

    python tests/real_model/quality_table.py [--tokens 20000]

The plain checkpoint is the default model's GGUF file, dequantized to float32 (this needs the
packages gguf, safetensors and transformers). NVFP4 and MXFP4 have no flag that quantizes a plain
checkpoint. For them, the matrices of the layers are rounded to what the format can hold, which is
what a checkpoint of the format would be computed with. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "bench")]

import torch
from quality import judge, measure
from write_peer_model import write

from pegboard.config.sources import engine_settings
from pegboard.plan.engine_plan import resolve

PLAIN: dict[str, Any] = {"dtype": "float32"}
ROWS: dict[str, dict[str, Any]] = {
    **{
        f"weights: rtn, {bits} bits": {
            "quantization": "rtn",
            "plugin_options": {"quantization.rtn": {"bits": bits}},
        }
        for bits in (8, 6, 4, 3)
    },
    "weights: rtn, 4 bits in groups of 128": {
        "quantization": "rtn",
        "plugin_options": {"quantization.rtn": {"bits": 4, "group_size": 128}},
    },
    "weights: fp8, scale per channel": {"quantization": "fp8"},
    "weights: bitsandbytes nf4": {"quantization": "bitsandbytes"},
    **{
        f"KV cache: {name}": {"kv_cache_dtype": name}
        for name in ("bfloat16", "float16", "int8", "fp8", "fp8_e5m2")
    },
}


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """Round to FP4 with a scale in e4m3 for 16 columns and one in float32 for the matrix, so that
    the largest scale is 448."""
    factor = weight.abs().max() / 6 / 448
    blocks = weight.reshape(-1, 16)
    scales = (blocks.abs().amax(1, keepdim=True) / 6 / factor).to(
        torch.float8_e4m3fn
    ).float() * factor
    return nearest_fp4(blocks, scales).reshape(weight.shape)


def mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """Round to FP4 with a power of two for 32 columns: that of the largest value, over 4 (OCP
    Microscaling Formats, 6.3)."""
    blocks = weight.reshape(-1, 32)
    scales = torch.exp2(
        torch.floor(torch.log2(blocks.abs().amax(1, keepdim=True).clamp_min(2.0**-120))) - 2
    )
    return nearest_fp4(blocks, scales).reshape(weight.shape)


def nearest_fp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the nearest multiples of the scales that FP4 can hold."""
    found = (blocks / scales.clamp_min(1e-30)).abs().clamp_max(6.0)
    codes = torch.bucketize(found, (FP4[1:] + FP4[:-1]) / 2)
    return FP4[codes] * blocks.sign() * scales


def write_rounded(
    source: Path, target: Path, rounding: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Copy a plain checkpoint. The matrices of its layers are rounded."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if ".layers." in name and weight.dim() == 2:
            weights[name] = rounding(weight).contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="What quantizing the default model costs.")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of text")
    num_tokens = parser.parse_args().tokens
    source = resolve(engine_settings(None, {}))[0].checkpoint.path
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write(Path(source), model)
        exact = measure(str(model), num_tokens, **PLAIN)
        print(f"{len(exact.choices)} tokens, perplexity in float32 {exact.perplexity:.4f}\n")
        print(
            "| quantized | perplexity | change | same greedy token |\n|---|---|---|---|", flush=True
        )
        runs = [(name, model, settings) for name, settings in ROWS.items()]
        for rounding in (nvfp4, mxfp4):
            rounded = Path(folder) / rounding.__name__
            write_rounded(model, rounded, rounding)
            runs.append((f"weights: {rounding.__name__}", rounded, {}))
        for name, path, settings in runs:
            found = judge(exact, measure(str(path), num_tokens, **{**PLAIN, **settings}))
            print(
                (
                    f"| {name} | {found.found:.4f} | {found.change:+.2%} ± {found.error:.2%} | "
                    f"{found.agreement:.1%} |"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
