"""An engine starts without reading weights, which are random, and takes the real ones later: a
start takes less time where a trainer sends weights anyway.

python examples/offline/skip_loading_weights.py --model FOLDER
"""

import argparse

from pegboard import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with config.json and weights")
    model = parser.parse_args().model
    params = SamplingParams(temperature=0, max_tokens=8)
    prompt = "The capital of France is"
    with LLM(model, load_format="dummy") as llm:
        for state in ("random weights", "real weights"):
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            print(f"{state}: {output.outputs[0].text!r}")
            llm.update_weights(model)


if __name__ == "__main__":
    main()
