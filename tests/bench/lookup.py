"""llama.cpp's lookup decoding beside its plain decoding, for drafts.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from side import Side

LENGTHS = (0, 3, 7, 10)
"""Most draft tokens a step. 0: plain decoding."""

MAX_NGRAM_SIZE = 4
"""Most last tokens that are looked up. The package's default is 2."""


class Lookup:
    """llama.cpp in a process of its own. It answers in turns with Pegboard, one request at a
    time. python: an interpreter with llama-cpp-python."""

    def __init__(self, python: str, model: Path) -> None:
        self.side = Side("llama.cpp-lookup", python, "side_lookup.py", [str(model)])
        self.begin()

    def begin(self) -> None:
        """Forget what was measured."""
        self.seconds: list[list[float]] = []

    def add(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        """Answer the prompts with every length, with as many tokens as these answers have."""
        self.answers = answers
        done = [
            self.side.ask(
                {
                    "job": "answer",
                    "prompt": prompt,
                    "max_tokens": len(answer),
                    "lengths": LENGTHS,
                    "max_ngram_size": MAX_NGRAM_SIZE,
                }
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        columns = zip(*(found["seconds"] for found in done), strict=True)
        self.seconds.append([sum(column) for column in columns])
        self.token_ids = [*zip(*(found["token_ids"] for found in done), strict=True)]

    def report(self, kind: str) -> str:
        """Return one line for each length, on all rounds."""
        plain, *drafting = zip(*self.seconds, strict=True)
        num_tokens = sum(map(len, self.answers))
        differing = _differing(self.answers, self.token_ids[0])
        lines = [
            f"{kind}, llama.cpp: {num_tokens / statistics.median(plain):.0f} tokens/s; "
            f"{differing} answers differ from Pegboard's"
        ]
        for place, seconds in enumerate(drafting, 1):
            ratios = [a / b for a, b in zip(plain, seconds, strict=True)]
            lines.append(
                f"{kind}, llama.cpp, lookup of {LENGTHS[place]} tokens: "
                f"{num_tokens / statistics.median(seconds):.0f} tokens/s, "
                f"{statistics.median(ratios):.2f} × plain ({min(ratios):.2f} to "
                f"{max(ratios):.2f}); "
                f"{_differing(self.token_ids[0], self.token_ids[place])} answers differ"
            )
        return "\n".join(lines)


def _differing(expected: Sequence[list[int]], found: Sequence[list[int]]) -> int:
    return sum(a != b for a, b in zip(expected, found, strict=True))
