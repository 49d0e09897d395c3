"""Runs vLLM, in an interpreter that has it: one job as JSON on stdin, the result as JSON on stdout.

Job: {"model": folder, "prompts": [token ids], "max_tokens": int}.
Result: {"answers": [token ids], "logprobs": [[of each prompt token but the first]]}.
Not imported by Pegboard.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    job = json.load(sys.stdin)
    stdout = os.dup(1)
    os.dup2(2, 1)  # anything printed meanwhile is not a result
    from vllm import LLM, SamplingParams

    llm = LLM(job["model"], skip_tokenizer_init=True, dtype=job["dtype"], enforce_eager=True)
    params = SamplingParams(
        max_tokens=job["max_tokens"],
        temperature=0,
        prompt_logprobs=0,
        detokenize=False,
        ignore_eos=True,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False
    )
    result = {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [
                row[token].logprob
                for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for prompt, output in zip(job["prompts"], outputs, strict=True)
        ],
    }
    with os.fdopen(stdout, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
