"""A profile of some steps, which chrome://tracing and https://ui.perfetto.dev show.

python examples/offline/simple_profiling.py [--model MODEL] FOLDER
"""

import argparse
from pathlib import Path

from pegboard import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("folder", type=Path)
    words = parser.parse_args()
    with LLM(words.model) as llm:
        llm.start_profile(str(words.folder))
        llm.generate("Hello, my name is", SamplingParams(max_tokens=2), use_tqdm=False)
        llm.stop_profile()
    for path in sorted(words.folder.rglob("*.json*")):
        print(path)


if __name__ == "__main__":
    main()
