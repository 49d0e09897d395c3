"""Answers for a JSONL file with one prompt a line. The file is read and written in batches, so it
may be larger than memory.

python examples/offline/batch_inference_jsonl.py [--model MODEL] INPUT OUTPUT
"""

import argparse
import itertools
import json
from pathlib import Path

from pegboard import LLM, SamplingParams

BATCH_SIZE = 64


def run(llm: LLM, source: Path, target: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as answers:
        rows = (json.loads(line) for line in lines if line.strip())
        while batch := list(itertools.islice(rows, BATCH_SIZE)):
            prompts = [row["prompt"] for row in batch]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for row, output in zip(batch, outputs, strict=True):
                answers.write(json.dumps({**row, "answer": output.outputs[0].text}) + "\n")
            print(f"{len(batch)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    words = parser.parse_args()
    with LLM(words.model) as llm:
        run(llm, words.input, words.output)


if __name__ == "__main__":
    main()
