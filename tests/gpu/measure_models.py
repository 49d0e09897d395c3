"""The parts of `measure.py` that run whole models: tiny ones, whose logprobs must be those of
transformers, and large ones with random weights, whose speed is compared with the roofs."""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure_run import Run
from measure_shapes import INT4_BYTES, Work, shape_of, work_of, write_config, write_quantized

PARITY = Path(__file__).parents[1] / "parity"
LARGEST_ERROR = 1e-3
"""Of a logprob in float32."""
TINY_MODELS: dict[str, tuple[str, str]] = {
    "llama": ("test_llama_parity", "llama"),
    "mistral": ("test_llama_parity", "mistral, window"),
    "qwen3": ("test_llama_parity", "qwen3"),
    "gemma2": ("test_dense_parity", "gemma2, capped scores and logits"),
    "phi3": ("test_dense_parity", "phi3, partial rotation"),
    "olmo3": ("test_dense_parity", "olmo3, scaled rotation of full attention"),
    "glm4": ("test_dense_parity", "glm4"),
    "cohere2": ("test_dense_parity", "cohere2, windows"),
    "falcon": ("test_dense_parity", "falcon, one head of keys"),
    "gpt2": ("test_dense_parity", "gpt2"),
    "mixtral": ("test_experts_parity", "mixtral"),
    "qwen2_moe": ("test_experts_parity", "qwen2_moe"),
    "gpt_oss": ("test_experts_parity", "gpt_oss"),
    "llama4": ("test_experts_parity", "llama4"),
    "deepseek_v2": ("test_latent_parity", "deepseek_v2, as V2-Lite"),
    "deepseek_v3": ("test_latent_parity", "deepseek_v3"),
    "minicpm3": ("test_latent_parity", "minicpm3"),
    "mamba": ("test_state_parity", "mamba"),
    "mamba2": ("test_state_parity", "mamba2"),
    "jamba": ("test_state_parity", "jamba"),
    "qwen3_next": ("test_state_parity", "qwen3_next"),
}
"""Name → the module of tests/parity and the name in its ARCHITECTURES."""
QUICK = ("llama", "deepseek_v3")
"""Those that run when the script itself is tested."""


def check_model(run: Run, name: str) -> dict[str, Any]:
    """The logprobs of the whole vocabulary after each token of prompts and answers, and the greedy
    tokens, are those of transformers on the CPU, in float32."""
    if run.tiny and name not in QUICK:
        return {"skipped": "one model shows that the script works"}
    if str(PARITY) not in sys.path:
        sys.path.insert(0, str(PARITY))
    tiny_models = importlib.import_module("tiny_models")
    module, key = TINY_MODELS[name]
    model_type, config = importlib.import_module(module).ARCHITECTURES[key]
    model = tiny_models.make_model(model_type, **config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        reference = tiny_models.Reference(Path(folder), model)
        lengths = (6,) if run.tiny else tiny_models.PROMPT_LENGTHS
        with tiny_models.open_llm(reference.directory, device=run.platform) as llm:
            return compare(tiny_models, reference, llm, lengths)


def compare(parity: Any, reference: Any, llm: Any, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return the largest error of a logprob, and how many answers have the greedy tokens."""
    from pegboard import SamplingParams

    params = SamplingParams(
        max_tokens=parity.NUM_OUTPUT_TOKENS,
        temperature=0,
        prompt_logprobs=-1,
        logprobs=-1,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = parity.random_prompts(lengths)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    worst = 0.0
    equal = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        expected = reference.logprobs([*prompt, *answer.token_ids])[:-1]
        rows = [*output.prompt_logprobs[1:], *answer.logprobs]
        count = len(expected[0])
        numbers = torch.tensor([[row[token].logprob for token in range(count)] for row in rows])
        worst = max(worst, float((numbers - expected).abs().max()))
        greedy = expected[len(prompt) - 1 :].argmax(-1).tolist()
        equal += list(answer.token_ids) == greedy
    right = equal == len(prompts) and worst <= LARGEST_ERROR
    return {"right": right, "error": worst, "equal": equal, "rows": len(prompts)}


def open_shape(run: Run, name: str, is_packed: bool = False) -> Any:
    """Return an engine with a large model of random weights, in its default type. The config, or
    the checkpoint in 4 bits, is in a temporary folder while it is loaded."""
    from pegboard import LLM

    config = shape_of(name, run.tiny)
    with tempfile.TemporaryDirectory() as folder:
        if is_packed:
            write_quantized(config, Path(folder))
        else:
            write_config(config, Path(folder))
        settings = {"kv_cache_memory_bytes": 1 << 22, "max_num_seqs": 4} if run.tiny else {}
        return LLM(
            folder,
            device=run.platform,
            load_format="auto" if is_packed else "dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=128 if run.tiny else 8448,
            max_num_batched_tokens=64 if run.tiny else 8192,
            **settings,
        )


class Shape:
    """A large model, as some parts share it. name: in `SHAPES`. is_packed: its linear layers have 4
    bits."""

    def __init__(self, name: str, is_packed: bool = False) -> None:
        self.name = name
        self.is_packed = is_packed

    def engine(self, run: Run) -> Any:
        key = f"{self.name} in 4 bits" if self.is_packed else self.name
        return run.engine_of(key, lambda: open_shape(run, self.name, self.is_packed))

    def work(self, run: Run) -> Work:
        return work_of(shape_of(self.name, run.tiny), INT4_BYTES if self.is_packed else 2.0)

    def vocabulary(self, run: Run) -> int:
        return int(shape_of(self.name, run.tiny)["vocab_size"])

    def start(self, run: Run) -> dict[str, Any]:
        """Start the engine. Returns how long it takes."""
        started = time.perf_counter()
        self.engine(run)
        return {"start_s": round(time.perf_counter() - started, 2)}

    def decode(self, run: Run, rows: int, context: int, steps: int) -> dict[str, Any]:
        """Decode steps of `rows` requests with this many tokens each: the bytes that they read, per
        second."""
        if run.tiny:
            rows, context, steps = min(rows, 3), 12, 4
        llm = self.engine(run)
        vocabulary = self.vocabulary(run)
        decode_steps(llm, random_prompts(rows, 12, vocabulary), 2)  # compiles what is not compiled
        seconds, length = decode_steps(llm, random_prompts(rows, context, vocabulary), steps)
        num_bytes = self.work(run).step_bytes(rows, length)
        rate = num_bytes / seconds
        return {
            "rate": rate,
            "roof": "memory_roof",
            "of_roof": run.of_roof(rate, "memory_roof"),
            "tokens_per_s": round(rows / seconds, 1),
            "step_ms": round(1e3 * seconds, 3),
            "step_bytes": round(num_bytes),
        }

    def prefill(self, run: Run, count: int) -> dict[str, Any]:
        """A prompt of `count` tokens, from the request to its first token: operations per second,
        the best of three."""
        if run.tiny:
            count = 40
        llm = self.engine(run)
        seconds = [
            prompt_seconds(llm, random_prompts(1, count, self.vocabulary(run)))
            for _ in range(2 if run.tiny else 4)
        ]
        best = min(seconds[1:])
        rate = self.work(run).prompt_operations(count) / best
        return {
            "rate": rate,
            "roof": "matrix_roof",
            "of_roof": run.of_roof(rate, "matrix_roof"),
            "tokens_per_s": round(count / best, 1),
            "seconds": best,
        }


def random_prompts(rows: int, length: int, vocabulary: int) -> list[list[int]]:
    return torch.randint(2, vocabulary, (rows, length)).tolist()


def prompt_seconds(llm: Any, prompts: list[list[int]]) -> float:
    """Return how long prompts take together, from the request to the last first token."""
    from pegboard import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    started = time.perf_counter()
    llm.generate(inputs, params, use_tqdm=False)
    return time.perf_counter() - started


def decode_steps(llm: Any, prompts: list[list[int]], steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and the tokens that each request had on average. The clock runs
    while all requests decode, for `steps` tokens of each."""
    from pegboard import SamplingParams
    from pegboard.data.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    params = SamplingParams(
        temperature=0,
        max_tokens=steps + 100,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    for index, prompt in enumerate(prompts):
        engine.add_request(f"row {index}", {"prompt_token_ids": prompt}, params)
    waiting = {f"row {index}" for index in range(len(prompts))}
    count = 0
    before = 0
    started = 0.0
    while not started or count < before + steps * len(prompts):
        outputs = engine.step()
        if any(output.finished for output in outputs):
            raise RuntimeError("a request ended before all of them ran together")
        count += sum(len(output.outputs[0].token_ids) for output in outputs)
        waiting -= {output.request_id for output in outputs}
        if not started and not waiting:
            before = count
            started = time.perf_counter()
    seconds = time.perf_counter() - started
    engine.abort_all()
    computed = count - before
    length = len(prompts[0]) + (before + computed / 2) / len(prompts)
    return seconds * len(prompts) / computed, length


LLAMA = Shape("llama_8b")
PACKED_LLAMA = Shape("llama_8b", is_packed=True)
MIXTRAL = Shape("mixtral")
DEEPSEEK = Shape("deepseek")
CHECKS: dict[str, Callable[[Run], dict[str, Any]]] = {
    f"model_{name}": lambda run, name=name: check_model(run, name) for name in TINY_MODELS
}
LLAMA_BENCHES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "llama_8b_start": LLAMA.start,
    "llama_8b_decode_1": lambda run: LLAMA.decode(run, 1, 128, 128),
    "llama_8b_decode_256": lambda run: LLAMA.decode(run, 256, 1024, 48),
    "llama_8b_prefill_8192": lambda run: LLAMA.prefill(run, 8192),
}
PACKED_BENCHES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "llama_8b_int4_start": PACKED_LLAMA.start,
    "llama_8b_int4_decode_1": lambda run: PACKED_LLAMA.decode(run, 1, 128, 128),
    "llama_8b_int4_prefill_8192": lambda run: PACKED_LLAMA.prefill(run, 8192),
}
MIXTRAL_BENCHES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "mixtral_start": MIXTRAL.start,
    "mixtral_decode_1": lambda run: MIXTRAL.decode(run, 1, 128, 128),
    "mixtral_decode_64": lambda run: MIXTRAL.decode(run, 64, 1024, 48),
    "mixtral_prefill_8192": lambda run: MIXTRAL.prefill(run, 8192),
}
DEEPSEEK_BENCHES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "deepseek_start": DEEPSEEK.start,
    "deepseek_decode_1": lambda run: DEEPSEEK.decode(run, 1, 128, 128),
    "deepseek_decode_64": lambda run: DEEPSEEK.decode(run, 64, 1024, 48),
    "deepseek_prefill_8192": lambda run: DEEPSEEK.prefill(run, 8192),
}
