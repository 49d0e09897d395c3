"""Measures what quantizing the default model costs in perplexity and greedy choices: each way to quantize a plain checkpoint when
it loads, and each type of the KV cache.

    python tests/real_model/quality_table.py [--tokens 20000]

The plain checkpoint is the default model's GGUF file, dequantized to float32 (this needs the packages gguf, safetensors and
transformers). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "bench")]

from quality import judge, measure
from write_peer_model import write

from pegboard.config.sources import engine_settings
from pegboard.plan.engine_plan import resolve

PLAIN: dict[str, Any] = {"dtype": "float32"}
ROWS: dict[str, dict[str, Any]] = {
    **{
        f"weights: rtn, {bits} bits": {"quantization": "rtn", "plugin_options": {"quantization.rtn": {"bits": bits}}}
        for bits in (8, 6, 4, 3)
    },
    "weights: fp8, scale per channel": {"quantization": "fp8"},
    "weights: bitsandbytes nf4": {"quantization": "bitsandbytes"},
    **{f"KV cache: {name}": {"kv_cache_dtype": name} for name in ("bfloat16", "float16", "int8", "fp8", "fp8_e5m2")},
}


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
        print("| quantized | perplexity | change | same greedy token |\n|---|---|---|---|", flush=True)
        for name, settings in ROWS.items():
            found = judge(exact, measure(str(model), num_tokens, **{**PLAIN, **settings}))
            print(f"| {name} | {found.found:.4f} | {found.change:+.2%} ± {found.error:.2%} | {found.agreement:.1%} |", flush=True)


if __name__ == "__main__":
    main()
