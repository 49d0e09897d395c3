"""Offline generation on two engines, each in a process of its own. `AsyncLLM` spreads the prompts
over them.

python examples/offline/data_parallel.py
"""

import asyncio

from pegboard import AsyncLLM, SamplingParams

PROMPTS = ["The capital of France is", "A paged KV cache is", "Water boils at", "Two and two are"]


async def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    async with AsyncLLM(data_parallel_size=2) as llm:

        async def answer(prompt: str) -> str:
            outputs = [output async for output in llm.generate(prompt, params)]
            return outputs[-1].outputs[0].text

        for prompt, text in zip(PROMPTS, await asyncio.gather(*map(answer, PROMPTS)), strict=True):
            print(f"{prompt!r} -> {text!r}")


if __name__ == "__main__":
    asyncio.run(main())
