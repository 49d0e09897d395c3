"""Speculative decoding with an MLP speculator, a small head that proposes the next tokens. The
texts are those of the model alone.

python examples/offline/mlpspeculator.py --model MODEL --speculator MODEL [--num-spec-tokens 3]
"""

import argparse
from typing import Any

from pegboard import LLM, SamplingParams
from pegboard.data.output import Counter

PROMPTS = ["The capital of France is", "Hello, my name is"]


def texts_of(model: str, **settings: Any) -> list[str]:
    with LLM(model, disable_log_stats=False, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for metric in llm.get_metrics():
            if "spec_decode" in metric.name and isinstance(metric, Counter):
                print(f"{metric.name} = {metric.value}")
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speculator", required=True)
    parser.add_argument("--num-spec-tokens", type=int, default=3)
    words = parser.parse_args()
    config = {
        "method": "mlp_speculator",
        "model": words.speculator,
        "num_speculative_tokens": words.num_spec_tokens,
        "adaptive_length": False,  # always propose, also where it does not help
    }
    same = texts_of(words.model) == texts_of(words.model, speculative_config=config)
    print("the same texts:", same)


if __name__ == "__main__":
    main()
