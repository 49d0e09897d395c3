"""Usage: MODEL. Stream answers from an engine in a process of its own."""

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    params = SamplingParams(
        max_tokens=6, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA
    )
    text = ""
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=params
    ):
        text += "".join(completion.text for completion in output.outputs)
        if output.finished:
            break
    return text


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], enforce_eager=True))
    try:
        for number, prompt in enumerate(["The future is", "In a galaxy"], 1):
            print(repr(await stream(engine, prompt, f"stream-example-{number}")))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
