"""Loads the weights that save_sharded_state.py has saved, with as many ranks.

python examples/offline/load_sharded_state.py --model FOLDER
"""

import argparse

from pegboard import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    words = parser.parse_args()
    with LLM(
        words.model,
        load_format="sharded_state",
        tensor_parallel_size=words.tensor_parallel_size,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        for output in llm.generate(["Hello, my name is"], params, use_tqdm=False):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
