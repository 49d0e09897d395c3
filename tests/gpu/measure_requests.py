"""The parts of `measure.py` about many requests of mixed lengths, as people send them: through
Pegboard and through the continuous batching of transformers, with the same model."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import torch
from measure_models import LLAMA
from measure_run import Run
from measure_shapes import shape_of

NUM_REQUESTS = 1000
MEAN_PROMPT = 220
MEAN_ANSWER = 200
SPREAD = 1.0
"""Of the logarithms. Lengths are like those of ShareGPT's conversations: most of them short, and
some of them long."""
LONGEST = 1024
"""Tokens of a prompt, and of an answer."""
PATIENCE_S = 100.0
"""transformers is stopped after this time."""


def lengths_of(count: int, mean: float, longest: int, seed: int) -> list[int]:
    """Return this many lengths, drawn from a log-normal distribution. mean: of the distribution,
    before lengths are limited to 4 … longest."""
    draw = random.Random(seed)
    middle = math.log(mean) - SPREAD**2 / 2
    return [min(max(round(draw.lognormvariate(middle, SPREAD)), 4), longest) for _ in range(count)]


def requests_of(run: Run) -> list[tuple[list[int], int]]:
    """Return prompts and the number of tokens of their answers, the same in each run."""
    count = 6 if run.tiny else NUM_REQUESTS
    longest = 16 if run.tiny else LONGEST
    prompts = lengths_of(count, 8 if run.tiny else MEAN_PROMPT, longest, 0)
    answers = lengths_of(count, 8 if run.tiny else MEAN_ANSWER, longest, 1)
    vocabulary = shape_of("llama_8b", run.tiny)["vocab_size"]
    draw = random.Random(2)
    return [
        ([draw.randrange(2, vocabulary) for _ in range(length)], answer)
        for length, answer in zip(prompts, answers, strict=True)
    ]


def rates(requests: list[tuple[list[int], int]], seconds: float) -> dict[str, Any]:
    prompts = sum(len(prompt) for prompt, _ in requests)
    answers = sum(answer for _, answer in requests)
    return {
        "requests": len(requests),
        "prompt_tokens": prompts,
        "output_tokens": answers,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(answers / seconds, 1),
        "tokens_per_s": round((prompts + answers) / seconds, 1),
    }


def pegboard_requests(run: Run) -> dict[str, Any]:
    """All requests arrive at once."""
    from pegboard import SamplingParams

    llm = LLAMA.engine(run)
    requests = requests_of(run)
    params = [
        SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        for _, answer in requests
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    few = slice(32)  # compiles what is not compiled
    llm.generate(inputs[few], params[few], use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [answer for _, answer in requests], "every answer has its length"
    return rates(requests, seconds)


def transformers_requests(run: Run) -> dict[str, Any]:
    """The same with the continuous batching of transformers. If it takes too long, the rates are
    those of the requests that are done."""
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig

    config = dict(shape_of("llama_8b", run.tiny))
    config.pop("architectures")
    model_type = config.pop("model_type")
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **config),
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
        ).eval()
    model.generation_config.eos_token_id = -1
    settings: dict[str, Any] = {"num_blocks": 16, "max_batch_tokens": 64} if run.tiny else {}
    failure = ""
    for with_flash in (False,) if run.tiny else (True, False):
        model.set_attn_implementation("sdpa")
        chosen = ContinuousBatchingConfig(auto_switch_to_flash=with_flash, **settings)
        try:
            found = batched(run, model, chosen)
        except Exception as error:  # noqa: BLE001 – the other attention may run here
            failure = f"{type(error).__name__}: {error}"
            continue
        ours = run.results.get("requests", {}).get("output_tokens_per_s")
        if ours:
            found["pegboard_is_faster"] = round(ours / found["output_tokens_per_s"], 2)
        return found | ({"without_flash": failure} if failure else {})
    raise RuntimeError(failure)


def batched(run: Run, model: Any, settings: Any) -> dict[str, Any]:
    """Run all requests through the continuous batching of transformers. Its start is not in the
    time."""
    from transformers.generation.continuous_batching.utils import WorkloadHints

    requests = requests_of(run)
    hints = WorkloadHints(
        max_prompt_length=max(len(prompt) for prompt, _ in requests),
        max_generated_length=max(answer for _, answer in requests),
        num_requests=len(requests),
    )
    with model.continuous_batching_context_manager(
        continuous_batching_config=settings, timeout=5, workload_hints=hints
    ) as manager:
        started = time.perf_counter()
        waiting = {}
        for prompt, answer in requests:
            name = manager.add_request(list(prompt), max_new_tokens=answer, eos_token_id=-1)
            waiting[name] = (prompt, answer)
        finished = []
        while waiting and time.perf_counter() - started < PATIENCE_S:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the thread of transformers has ended")
                continue
            if result.error:
                raise RuntimeError(result.error)
            if result.is_finished():
                finished.append(waiting.pop(result.request_id))
        seconds = time.perf_counter() - started
        if not finished:
            raise RuntimeError(f"no request was done after {seconds:.0f} s")
        found = rates(finished, seconds)
        found["attention"] = model.config._attn_implementation
        if waiting:
            found["stopped_early"] = True
        run.note(found)  # the end of its thread may take too long
    return found
