"""Usage: MODEL. Ask for the vectors of prompts as tensors."""

import sys

import torch
from vllm import LLM, PoolingParams

llm = LLM(sys.argv[1], runner="pooling")
outputs = llm.encode(["Hello", "Bye"], PoolingParams(), pooling_task="embed")
for output in outputs:
    assert isinstance(output.outputs.data, torch.Tensor)
    print(output.request_id, output.outputs.data.shape, output.prompt_token_ids)
