"""How fast plain checkpoints are at the type that they name, beside vLLM's default and float32.

    python tests/bench/checkpoints.py [NAME …] [--vllm PYTHON] [--rounds 3] [--folder DIRECTORY]

Makes checkpoints of random bfloat16 numbers in the shape of each family. All sides stay loaded and
take turns: Pegboard at its default type and in float32, and vLLM's the same if its interpreter is
named. Prints the median output tokens per second with 1, 8 and 32 requests (prompts of 64 tokens,
outputs of 64), the prompt tokens per second of 4 prompts of 512 tokens, and the seconds from the
start of the process to its first token. No prompt is computed from a prefix cache.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import cpu, read_gb_per_s
from peers import start_vllm
from side import Side
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from workload import FIRST_ID, LAST_ID

from pegboard.config.schema import EngineConfig, Settings
from pegboard.plan.engine_plan import resolve

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
}
"""Those of Qwen3-0.6B, with 12 of its 28 layers and a smaller vocabulary, and of Gemma 3 270M."""

COMMON = {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODED = (1, 8, 32)
PROMPT, OUTPUT = 64, 64
PREFILLED, PREFILL = 4, 512


def write(name: str, directory: Path) -> int:
    """Write a checkpoint, with the default model's tokenizer. Returns the bytes of the weights that
    a token reads."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **COMMON, **SHAPES[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    source = resolve(Settings(engine=EngineConfig()))[0].checkpoint.path
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(directory)
    return sum(parameter.nbytes for parameter in model.parameters())


def prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)] for _ in range(count)]


def measure(side: Side, rng: random.Random) -> list[float]:
    """Return one round's rates."""
    jobs = [(count, PROMPT, OUTPUT) for count in DECODED] + [(PREFILLED, PREFILL, 1)]
    rates = []
    for count, length, outputs in jobs:
        answer = side.ask(
            {
                "job": "generate",
                "prompts": prompts(rng, count, length),
                "max_tokens": [outputs] * count,
            }
        )
        tokens = count * (outputs if outputs > 1 else length)
        rates.append(tokens / answer["seconds"])
    return rates


def start(folder: Path, vllm: str | None) -> Iterator[Side]:
    for dtype in ("auto", "float32"):
        arguments = [str(folder), f'dtype="{dtype}"', "enable_prefix_caching=false"]
        yield Side(f"pegboard {dtype}", sys.executable, "side_pegboard.py", arguments)
        if vllm:
            yield start_vllm(f"vllm {dtype}", vllm, folder, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - SHAPES.keys():
        parser.error(f"unknown shape {min(unknown)!r}; there are {', '.join(SHAPES)}")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    print(f"{cpu()['cpu']}, memory read at {read_gb_per_s(5):.1f} GB/s")
    for name in chosen.names or SHAPES:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            size = write(name, Path(folder))
            sides = list(start(Path(folder), chosen.vllm))
            rates: dict[str, list[list[float]]] = {side.name: [] for side in sides}
            for number in range(chosen.rounds + 1):
                for side in sides:
                    rates[side.name].append(measure(side, random.Random(number)))
            print(f"{name}: {size / 1e6:.0f} MB in bfloat16")
            for side in sides:
                columns = zip(*rates[side.name][1:], strict=True)  # the first round warms up
                medians = [f"{statistics.median(column):8.1f}" for column in columns]
                print(f"{side.name:18}", *medians, f"  start {side.start_s:.1f} s", flush=True)
                side.stop()


if __name__ == "__main__":
    main()
