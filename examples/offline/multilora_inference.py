"""Requests with different LoRA adapters, and one without, in the same batch.

python examples/offline/multilora_inference.py --model MODEL ADAPTER ADAPTER …
"""

import argparse

from pegboard import LLM, LoRARequest, SamplingParams

PROMPT = "Write a SQL query that reads the names of all users:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("adapters", nargs="+", help="folders that PEFT has written")
    words = parser.parse_args()
    loras = [
        LoRARequest(f"adapter-{number}", number, folder)
        for number, folder in enumerate(words.adapters, 1)
    ]
    with LLM(words.model, enable_lora=True, max_loras=len(loras), max_lora_rank=16) as llm:
        prompts = [PROMPT] * (len(loras) + 1)
        params = SamplingParams(temperature=0, max_tokens=12)
        outputs = llm.generate(prompts, params, lora_request=[None, *loras], use_tqdm=False)
    for lora, output in zip([None, *loras], outputs, strict=True):
        name = lora.lora_name if lora else "base model"
        print(f"{name}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
