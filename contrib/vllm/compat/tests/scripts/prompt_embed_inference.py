"""Usage: MODEL. Prompts as embeddings."""

import sys

import torch
import transformers
from vllm import LLM, SamplingParams

tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
layer = model.get_input_embeddings()
llm = LLM(model=sys.argv[1], enable_prompt_embeds=True, dtype="float32")
params = SamplingParams(temperature=0, max_tokens=4)
ids = tokenizer("The capital is", return_tensors="pt", add_special_tokens=False).input_ids
embeds = layer(ids).squeeze(0).detach()
of_embeds = llm.generate({"prompt_embeds": embeds}, params)
batch = llm.generate([{"prompt_embeds": embeds} for _ in range(3)], params)
of_ids = llm.generate({"prompt_token_ids": ids[0].tolist()}, params)
texts = [output.outputs[0].text for output in (*of_embeds, *batch, *of_ids)]
assert len(set(texts)) == 1, texts
