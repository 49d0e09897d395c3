"""Prompts as embeddings: rows of the model's input layer instead of token ids. They may come from
another program; here they are those of the prompt's own tokens, so the answers are the same.

python examples/offline/prompt_embed_inference.py --model MODEL
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pegboard import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    model = parser.parse_args().model
    ids = AutoTokenizer.from_pretrained(model)("The capital of France is").input_ids
    layer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).get_input_embeddings()
    rows = layer(torch.tensor(ids)).detach()
    prompts = [{"prompt_embeds": rows}, {"prompt_token_ids": ids}]
    with LLM(model, enable_prompt_embeds=True, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        for prompt, output in zip(
            prompts, llm.generate(prompts, params, use_tqdm=False), strict=True
        ):
            print(f"{next(iter(prompt))}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
