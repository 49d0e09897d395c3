"""OpenVINO GenAI as a side: side_openvino.py MODEL.gguf. Runs under a Python with openvino-genai,
which reads the file itself."""

from __future__ import annotations

import sys
import time
from itertools import count
from typing import Any

import numpy as np
import openvino
import openvino_genai
from serving import serve

CACHE_GIB = 2


def main() -> None:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GIB
    scheduling.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduling, "CPU")
    ids = count()

    def add(prompt: list[int], max_tokens: int) -> Any:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = max_tokens
        settings.ignore_eos = True
        settings.do_sample = False
        return pipeline.add_request(
            next(ids), openvino.Tensor(np.array([prompt], np.int64)), settings
        )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> None:
        handles = [add(prompt, tokens) for prompt, tokens in zip(prompts, max_tokens, strict=True)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        lengths = [len(handle.read_all()[0].generated_ids) for handle in handles]
        assert lengths == max_tokens, (lengths, max_tokens)

    def stream(prompt: list[int], max_tokens: int) -> list[float]:
        handle = add(prompt, max_tokens)
        times = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            while handle.can_read():
                handle.read()
                times.append(time.perf_counter())
        assert len(times) == max_tokens
        return times

    serve(generate, stream)


if __name__ == "__main__":
    main()
