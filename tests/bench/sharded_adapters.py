"""What `fully_sharded_loras` costs and gains on this machine: two ranks that divide both matrices
of an adapter, against two that divide one of them.

    python tests/bench/sharded_adapters.py

Two engines with the default model take turns in one process. The adapter of rank RANK has random
numbers and changes every linear layer. Each number is the median of ROUNDS rounds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import cpu
from safetensors.torch import save_file

from pegboard import LLM, LoRARequest, SamplingParams
from pegboard.env import usable_cpus

RANK = 64
ROUNDS = 7
BATCHES = (1, 8)
NUM_TOKENS = 64
PROMPT = 1000
NUM_LAYERS = 30
SHAPES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}
"""Of SmolLM2-135M: [out, in]."""


def write_adapter(folder: Path) -> LoRARequest:
    tensors = {}
    for layer in range(NUM_LAYERS):
        for name, (rows, columns) in SHAPES.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(RANK, columns) * columns**-0.5
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, RANK) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("random", 1, str(folder))


def step_ms(llm: LLM, lora: LoRARequest | None, batch: int) -> float:
    """Return the time of a decode step."""
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    for number in range(batch):
        prompt = {"prompt_token_ids": [5 + number, 6, 7, 8]}
        engine.add_request(f"{number}", prompt, params, lora_request=lora)
    times = []
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[8:]) * 1e3


def prompt_ms(llm: LLM, lora: LoRARequest | None, number: int) -> float:
    """Return the time until the first token of a prompt."""
    ids = [(7 * i + 13 * number) % 4000 + 5 for i in range(PROMPT)]
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, lora_request=lora, use_tqdm=False)
    return (time.perf_counter() - started) * 1e3


def numbers(llm: LLM, lora: LoRARequest | None, number: int) -> list[float]:
    return [*(step_ms(llm, lora, batch) for batch in BATCHES), prompt_ms(llm, lora, number)]


def show(name: str, rounds: Sequence[Sequence[float]]) -> None:
    medians = [statistics.median(each) for each in zip(*rounds, strict=True)]
    print(f"| {name} | {' | '.join(f'{median:.2f}' for median in medians)} |", flush=True)


def main() -> None:
    common: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "num_threads": max(1, len(usable_cpus()) // 2),
        "enable_lora": True,
        "max_lora_rank": RANK,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 28,
        "max_model_len": 2048,
    }
    machine = cpu()
    batches = " | ".join(f"batch {batch}" for batch in BATCHES)
    print(f"ms a step ({machine['cpu']}, {machine['flags']}; 2 ranks)")
    print(f"| | {batches} | prompt of {PROMPT:,} |")
    with tempfile.TemporaryDirectory() as folder:
        lora = write_adapter(Path(folder))
        one, both = (LLM(**common, fully_sharded_loras=value) for value in (False, True))
        ways = {
            "no adapter": (one, None),
            "one matrix divided": (one, lora),
            "both": (both, lora),
        }
        measured: dict[str, list[list[float]]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name, (llm, used) in ways.items():
                measured[name].append(numbers(llm, used, number))
        for name, rounds in measured.items():
            show(name, rounds[1:])
        for llm in (one, both):
            llm.shutdown()


if __name__ == "__main__":
    main()
