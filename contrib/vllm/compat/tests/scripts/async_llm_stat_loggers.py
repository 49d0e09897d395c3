"""Usage: MODEL. Measure an engine with a stat logger of the script."""

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase


class Sums(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.num_tokens = 0
        self.requests = []
        loggers.append(self)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.num_tokens += iteration_stats.num_generation_tokens
        self.requests += iteration_stats.finished_requests

    def log_engine_initialized(self):
        print("ready")


loggers = []


async def main():
    args = AsyncEngineArgs(model=sys.argv[1], enforce_eager=True)
    engine = AsyncLLM.from_engine_args(args, stat_loggers=[Sums])
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    try:
        async for output in engine.generate("Hello", params, request_id="one"):
            text = output.outputs[0].text
        print(f"{text!r}")
        for _ in range(200):
            if loggers[0].requests:
                break
            await asyncio.sleep(0.05)
    finally:
        engine.shutdown()
    (request,) = loggers[0].requests
    assert (loggers[0].num_tokens, request.num_generation_tokens) == (5, 5)
    assert request.finish_reason == "length"


if __name__ == "__main__":
    asyncio.run(main())
