"""vLLM for CPU as a side: side_vllm.py DIRECTORY SETTINGS [ADAPTER_FOLDER …]. SETTINGS: arguments
of vLLM's `LLM`, as JSON. Runs under vLLM's own Python. With adapters, the job "decode" has one
entry per request: the number of an adapter, from 1 on, or 0."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from serving import serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest


def main() -> None:
    loras = [
        LoRARequest(f"adapter{number}", number, path) for number, path in enumerate(sys.argv[3:], 1)
    ]
    lora_settings = (
        {"enable_lora": True, "max_loras": len(loras), "max_lora_rank": 16, "max_model_len": 512}
        if loras
        else {}
    )
    llm: Any = LLM(sys.argv[1], disable_log_stats=True, **json.loads(sys.argv[2]), **lora_settings)

    def params(max_tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> None:
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = llm.generate(inputs, [params(count) for count in max_tokens], use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == max_tokens

    def stream(prompt: list[int], max_tokens: int) -> list[float]:
        engine = llm.llm_engine
        times = []
        engine.add_request("stream", TokensPrompt(prompt_token_ids=prompt), params(max_tokens))
        while engine.has_unfinished_requests():
            if engine.step():
                times.append(time.perf_counter())
        return times

    def decode(job: dict[str, Any]) -> dict[str, Any]:
        engine = llm.llm_engine
        times = []
        for index, number in enumerate(job["adapters"]):
            prompt = TokensPrompt(prompt_token_ids=job["prompts"][index])
            engine.add_request(
                f"{index}",
                prompt,
                params(job["max_tokens"]),
                lora_request=loras[number - 1] if number else None,
            )
        while engine.has_unfinished_requests():
            started = time.perf_counter()
            if engine.step():
                times.append(time.perf_counter() - started)
        return {"step_s": statistics.median(times[8 - job["max_tokens"] :])}

    serve(generate, stream, {"decode": decode})


if __name__ == "__main__":
    main()
