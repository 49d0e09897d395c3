"""A LoRA adapter over quantized weights: they stay packed, and the adapter's product is added to
what the layers compute.

python examples/offline/lora_with_quantization_inference.py [--model MODEL] ADAPTER
"""

import argparse

from pegboard import LLM, LoRARequest, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct in GGUF, with 4 bits")
    parser.add_argument("--quantization", help="default: as the checkpoint is stored")
    parser.add_argument("adapter", help="a folder that PEFT has written")
    words = parser.parse_args()
    with LLM(words.model, quantization=words.quantization, enable_lora=True, max_loras=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        for lora in (None, LoRARequest("adapter", 1, words.adapter)):
            (output,) = llm.generate(PROMPT, params, lora_request=lora, use_tqdm=False)
            print(f"{'with' if lora else 'without'} adapter: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
