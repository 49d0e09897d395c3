"""Usage: MODEL. Print the shapes of the vectors of tokens."""

import sys

from vllm import LLM

llm = LLM(sys.argv[1], runner="pooling")
outputs = llm.encode(["Hello", "Bye"], pooling_task="token_embed")
for output in outputs:
    data = output.outputs.data
    assert data.shape[0] == len(output.prompt_token_ids)
    print("tokens and size:", tuple(data.shape), float(data.norm(dim=-1).mean()))
