"""A model reads more tokens than it was trained for: YaRN stretches its rotary embedding, by a
change of the checkpoint's config.

python examples/offline/context_extension.py [--model MODEL] [--factor 4]
"""

import argparse

from pegboard import LLM, SamplingParams


def length_of(model: str) -> int:
    """Return the number of tokens that the checkpoint was made for."""
    with LLM(model, load_format="dummy") as llm:
        return llm.llm_engine.plan.max_model_len


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--factor", type=int, default=4)
    words = parser.parse_args()
    length = length_of(words.model)
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": float(words.factor),
        "original_max_position_embeddings": length,
    }
    longer = words.factor * length
    overrides = {"rope_parameters": rope, "max_position_embeddings": longer}
    with LLM(words.model, hf_overrides=overrides, max_model_len=longer) as llm:
        prompt = {"prompt_token_ids": [5] * (2 * length)}
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=8), use_tqdm=False)
    print(f"{len(output.prompt_token_ids)} prompt tokens, made for {length}, up to {longer}")
    print(repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
