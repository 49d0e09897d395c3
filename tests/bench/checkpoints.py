"""How fast models are in the types in which checkpoints store them, beside llama.cpp and vLLM.

    python tests/bench/checkpoints.py [MODEL …] [--llama PYTHON] [--vllm PYTHON] [--rounds 3]
    [--folder DIRECTORY] [--write]

A MODEL is `default` (the default model's file, and the same model in other block types), the name
of a shape (random numbers in each type of random_checkpoints.py, and bfloat16 computed in float32),
or the path of a GGUF file. Pegboard and the peer that reads the type take turns: llama.cpp for
GGUF, vLLM for all others. A peer that fails is left out.

Prints the median output tokens per second with 1, 8 and 32 requests (prompts of 64 tokens, outputs
of 64), the prompt tokens per second of 4 prompts of 512 tokens, and the seconds from the start of
the process to its first token. No prompt is computed from a prefix cache. --write puts the table on
docs/performance.md.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from machine import bytes_per_token, cpu, read_gb_per_s
from page import PAGE, put
from peers import start_vllm
from random_checkpoints import SHAPES, TYPES, write
from side import Side, SideFailed
from tqdm import tqdm
from transformers.utils import logging
from workload import FIRST_ID, LAST_ID
from write_gguf import write_as

from pegboard.config.schema import EngineConfig, Settings
from pegboard.plan.engine_plan import resolve

BEGIN = "<!-- checkpoints: written by tests/bench/checkpoints.py --write -->"
END = "<!-- end of checkpoints -->"

STEM = re.compile(r"(.*?)(?:[-.](I?Q\d\w*|B?F\d+))?")
"""Name and type of a model, in the name of its GGUF file."""
BLOCKS = ("Q4_0", "Q8_0")
DECODED = (1, 8, 32)
PROMPT, OUTPUT = 64, 64
PREFILLED, PREFILL = 4, 512
HEAD = ("model", "type", "MB a token", "side", *map(str, DECODED), "prompts", "start, s")


@dataclass(frozen=True)
class Subject:
    """A model in a type. dtype: that it is computed in. num_bytes: of the weights that a token
    reads."""

    model: str
    type: str
    path: Path
    dtype: str
    num_bytes: int


@dataclass(frozen=True)
class Peers:
    """The Python of each peer; None = it is not measured."""

    llama: str | None
    vllm: str | None

    def starters(self, subject: Subject) -> Iterator[Callable[[], Side]]:
        """Yield what starts each side, Pegboard first."""
        path = str(subject.path)
        settings = [f'dtype="{subject.dtype}"', "enable_prefix_caching=false"]
        yield lambda: Side("Pegboard", sys.executable, "side_pegboard.py", [path, *settings])
        llama, vllm = self.llama, self.vllm
        if subject.path.is_file():
            if llama is not None:
                yield lambda: Side("llama.cpp", llama, "side_llama.py", [path])
        elif vllm is not None:
            yield lambda: start_vllm("vLLM", vllm, subject.path, settings={"dtype": subject.dtype})


def subjects(names: list[str], folder: Path) -> Iterator[Subject]:
    """Write the checkpoints into the folder, one after the other."""
    default = resolve(Settings(engine=EngineConfig()))[0].checkpoint.path
    for name in names:
        if name == "default":
            yield _file(default)
            for kind in BLOCKS:
                path = folder / f"{name_and_type(default)[0]}.{kind}.gguf"
                write_as(default, path, kind)
                yield _file(path)
        elif name in SHAPES:
            for kind in TYPES:
                path = folder / f"{name}-{kind}"
                size = write(name, kind, path)
                yield Subject(f"shape of {name}", kind, path, "auto", size)
                if kind == "bfloat16":
                    yield Subject(f"shape of {name}", "float32", path, "float32", 2 * size)
        else:
            yield _file(Path(name))


def _file(path: Path) -> Subject:
    return Subject(*name_and_type(path), path, "auto", bytes_per_token(path)["stored"])


def name_and_type(path: Path) -> tuple[str, str]:
    """Return name and type of the model in a GGUF file, by the file's name."""
    parts = STEM.fullmatch(path.stem)
    assert parts is not None
    return parts[1], parts[2] or "mixed"


def _prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)] for _ in range(count)]


def _round(side: Side, rng: random.Random) -> list[float]:
    """Return one round's rates."""
    jobs = [(count, PROMPT, OUTPUT) for count in DECODED] + [(PREFILLED, PREFILL, 1)]
    rates = []
    for count, length, outputs in jobs:
        answer = side.ask(
            {
                "job": "generate",
                "prompts": _prompts(rng, count, length),
                "max_tokens": [outputs] * count,
            }
        )
        tokens = count * (outputs if outputs > 1 else length)
        rates.append(tokens / answer["seconds"])
    return rates


def measure(subject: Subject, peers: Peers, rounds: int) -> list[tuple[str, list[float], float]]:
    """Return for each side its name, its median rates, and its seconds to the first token."""
    sides = []
    for start in peers.starters(subject):
        try:
            sides.append(start())
        except SideFailed as error:
            tqdm.write(f"{subject.model} {subject.type}: {error}", sys.stderr)
    rates: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides:
            rates[side.name].append(_round(side, random.Random(number)))
    medians = []
    for side in sides:
        columns = zip(*rates[side.name][1:], strict=True)  # the first round warms up
        medians.append((side.name, [statistics.median(column) for column in columns], side.start_s))
        side.stop()
    return medians


def lines(
    subject: Subject, measured: list[tuple[str, list[float], float]], gb_per_s: float
) -> list[str]:
    """Return the lines of a table: one per side, and the ratio of the first to the second. The
    first number of Pegboard has its share of what the memory allows."""
    own = (subject.model, subject.type, f"{subject.num_bytes / 1e6:,.0f}")
    rows = []
    for name, rates, start_s in measured:
        cells = [f"{rate:,.0f}" for rate in rates]
        if name == "Pegboard":
            cells[0] += f" ({rates[0] * subject.num_bytes / gb_per_s / 1e7:.0f} %)"
        rows.append([*(own if not rows else ("", "", "")), name, *cells, f"{start_s:.1f}"])
    if len(measured) == 2:
        (_, ours, start_s), (_, theirs, their_start_s) = measured
        ratios = [f"{a / b:.2f} ×" for a, b in zip(ours, theirs, strict=True)]
        rows.append(["", "", "", "ratio", *ratios, f"{start_s / their_start_s:.2f} ×"])
    return ["| " + " | ".join(row) + " |" for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["default", *SHAPES])
    parser.add_argument("--llama")
    parser.add_argument("--vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true", help=f"to the page {PAGE.name}")
    chosen = parser.parse_args()
    for name in set(chosen.models) - {"default", *SHAPES}:
        if not Path(name).is_file():
            known = ", ".join(("default", *SHAPES))
            parser.error(f"expected the path of a GGUF file, or {known}, not {name!r}")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    gb_per_s = read_gb_per_s(5)
    peers = Peers(chosen.llama, chosen.vllm)
    text = [
        f"{cpu()['cpu']}, {cpu()['cores']} cores ({cpu()['flags']}), memory read at "
        f"{gb_per_s:.1f} GB/s; medians of {chosen.rounds} rounds.\n",
        "| " + " | ".join(HEAD) + " |",
        "|---|---|---:|---|" + "---:|" * (len(HEAD) - 4),
    ]
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for subject in tqdm(subjects(chosen.models, Path(folder)), desc="Measuring models"):
            rows = lines(subject, measure(subject, peers, chosen.rounds), gb_per_s)
            tqdm.write("\n".join(rows), sys.stderr)
            text += rows
    if chosen.write:
        PAGE.write_text(put(PAGE.read_text("utf-8"), "\n".join(text), BEGIN, END), "utf-8")
    else:
        print("\n".join(text))


if __name__ == "__main__":
    main()
