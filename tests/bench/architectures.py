"""How fast models with experts and states decode one request, against the memory's speed and
against transformers.

    python tests/bench/architectures.py [NAME …] [--tokens 48] [--rounds 5] [--dtype float32]
    [--alone]

Makes checkpoints of 60 to 110 million random numbers in the shape of each family. Both sides sample
as many tokens, in turns; other tokens choose other experts. Prints the median milliseconds per
token, the median of their ratio, the bytes that a token reads (the weights, but only as many
experts as a token has, and no embedding), and the share of the memory's speed that this is.
--alone: without transformers. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import cpu, read_gb_per_s
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from pegboard import LLM, SamplingParams

COMMON = {
    "vocab_size": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "max_position_embeddings": 2048,
}
ATTENTION = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {
        **ATTENTION,
        "intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **ATTENTION,
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "mamba2": {
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "num_heads": 24,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
    },
    "qwen3_next": {
        **ATTENTION,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
PROMPT = list(range(100, 132))


def make(name: str, dtype: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **COMMON, **SHAPES[name])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype)
    ).eval()
    return model


def bytes_read(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a token reads."""
    config = model.config
    total = 0
    own = SHAPES[config.model_type]
    share = own.get("num_experts_per_tok", 1) / (
        own.get("num_experts") or own.get("num_local_experts") or 1
    )
    head = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is head or parameter is not model.get_input_embeddings().weight:
            is_expert = ".experts." in name
            total += int(parameter.nbytes * (share if is_expert else 1.0))
    return total


def of_pegboard(directory: Path, dtype: str) -> Callable[[int], object]:
    llm = LLM(
        str(directory),
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        generation_config="vllm",
    )

    def run(count: int) -> object:
        params = SamplingParams(max_tokens=count, temperature=1, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)

    return run


def of_transformers(model: PreTrainedModel) -> Callable[[int], object]:
    prompt = torch.tensor([PROMPT])

    def run(count: int) -> object:
        with torch.no_grad():
            return model.generate(
                prompt, max_new_tokens=count, min_new_tokens=count, do_sample=True, top_k=0
            )

    return run


def seconds_per_token(run: Callable[[int], object], count: int) -> float:
    """Return the time of a decoded token. The time of the prompt and of the first token is
    subtracted."""
    times = []
    for tokens in (1, 1 + count):
        started = time.perf_counter()
        run(tokens)
        times.append(time.perf_counter() - started)
    return (times[1] - times[0]) / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--alone", action="store_true")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - SHAPES.keys():
        parser.error(f"unknown shape {min(unknown)!r}; there are {', '.join(SHAPES)}")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    speed = read_gb_per_s(5)
    print(f"{cpu()['cpu']}, memory read at {speed:.1f} GB/s")
    for name in chosen.names or SHAPES:
        model = make(name, chosen.dtype)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            runs = {"pegboard": of_pegboard(Path(folder), chosen.dtype)}
            if not chosen.alone:
                runs["transformers"] = of_transformers(model)
            for run in runs.values():
                run(2)  # warms up
            rounds = [
                {side: seconds_per_token(run, chosen.tokens) for side, run in runs.items()}
                for _ in range(chosen.rounds)
            ]
        read = bytes_read(model)
        own = statistics.median(taken["pegboard"] for taken in rounds)
        shown = (
            f"{name}: {own * 1e3:.2f} ms per token, {read / 1e6:.0f} MB, "
            f"{read / 1e9 / speed / own:.0%} of the memory's speed"
        )
        if not chosen.alone:
            other = statistics.median(taken["transformers"] for taken in rounds)
            ratio = statistics.median(taken["transformers"] / taken["pegboard"] for taken in rounds)
            shown += f"; transformers {other * 1e3:.2f} ms, {ratio:.2f} times as long"
        print(shown, flush=True)


if __name__ == "__main__":
    main()
