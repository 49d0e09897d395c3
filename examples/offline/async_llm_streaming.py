"""`AsyncLLM` streams answers from an engine in a process of its own. With DELTA, each output has
only what is new.

python examples/offline/async_llm_streaming.py [--model MODEL]
"""

import argparse
import asyncio

from pegboard import AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = ["The future of artificial intelligence is", "In a galaxy far, far away"]


async def stream(llm: AsyncLLM, prompt: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    print(f"{prompt!r} ->", end="")
    async for output in llm.generate(prompt, params):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
    print()


async def run(model: str | None) -> None:
    async with AsyncLLM(model) as llm:
        for prompt in PROMPTS:
            await stream(llm, prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    asyncio.run(run(parser.parse_args().model))


if __name__ == "__main__":
    main()
