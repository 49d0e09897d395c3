"""Saves the weights as each rank holds them, next to the other files of the checkpoint. Then
load_sharded_state.py reads them without looking at the whole checkpoint.

python examples/offline/save_sharded_state.py --model FOLDER --output FOLDER
"""

import argparse
import shutil
from pathlib import Path

from pegboard import LLM

WEIGHTS = (".bin", ".pt", ".safetensors", ".gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    words = parser.parse_args()
    words.output.mkdir(parents=True, exist_ok=True)
    with LLM(str(words.model), tensor_parallel_size=words.tensor_parallel_size) as llm:
        llm.save_sharded_state(words.output)
    for path in words.model.iterdir():
        if path.is_file() and path.suffix not in WEIGHTS:
            shutil.copy(path, words.output)
    print(*sorted(path.name for path in words.output.iterdir()))


if __name__ == "__main__":
    main()
