"""Usage: MODEL. Stretch the rotary embedding, and allow longer prompts."""

import sys

from vllm import LLM, RequestOutput, SamplingParams


def create_llm() -> LLM:
    overrides = {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        "max_position_embeddings": 1024,
    }
    return LLM(model=sys.argv[1], hf_overrides=overrides, max_model_len=1024)


def run(llm: LLM) -> list[RequestOutput]:
    conversation = [{"role": "user", "content": "Hello " * 60}]
    return llm.chat(conversation, SamplingParams(temperature=0.8, max_tokens=4), use_tqdm=False)


outputs = run(create_llm())
assert len(outputs[0].prompt_token_ids) > 256
