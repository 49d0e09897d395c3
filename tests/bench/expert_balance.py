"""Measures what it brings to move experts between ranks (`--enable-eplb`).

    python tests/bench/expert_balance.py [--write]

A mixture whose router prefers the experts of the first rank runs on two ranks with half of the
threads each, in turns: with experts that stay, with tokens that are only counted, and after
experts have moved. Each number is the median of ROUNDS rounds. --write puts the table on
docs/scaling.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from machine import cpu
from page import put
from random_checkpoints import write
from ranks import BATCHES, PAGE, PROMPT, rows
from safetensors.torch import load_file, save_file

from pegboard.env import usable_cpus

BEGIN = "<!-- experts that move: written by tests/bench/expert_balance.py --write -->"
END = "<!-- end of experts that move -->"
PREFERENCE = 3.0
"""How much larger the logits of the first half of the experts are."""
NEVER = 1_000_000
SOON = 400
"""Steps, of which one round has about two hundred."""


def prefer_first_experts(folder: Path) -> None:
    """Let the router of every layer choose the first half of the experts more often."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, router in tensors.items():
        if name.endswith("mlp.gate.weight"):
            router[: len(router) // 2] *= PREFERENCE
    save_file(tensors, path, {"format": "pt"})


def report(num_threads: int, folder: Path) -> str:
    write("qwen3_moe", "bfloat16", folder)
    prefer_first_experts(folder)
    machine = cpu()
    two: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "num_threads": max(1, num_threads // 2),
        "enable_expert_parallel": True,
    }
    counted = {"step_interval": NEVER}
    moved = {"step_interval": SOON, "window_size": SOON, "log_balancedness": True}
    copied = {**moved, "num_redundant_experts": 4}
    ways = {
        "they stay": two,
        "they are counted": {**two, "enable_eplb": True, "eplb_config": counted},
        "they have moved": {**two, "enable_eplb": True, "eplb_config": moved},
        "they have moved, 4 of them have a copy": {
            **two,
            "enable_eplb": True,
            "eplb_config": copied,
        },
    }
    batches = " | ".join(f"batch {count}" for count in BATCHES)
    return "\n".join(
        [
            f"Tokens per second ({machine['cpu']}, {machine['flags']}; 2 ranks, {num_threads} "
            "threads in all). In brackets: relative to experts that stay.",
            "",
            f"| model | experts | {batches} | prompt of {PROMPT:,} |",
            "|---|---|" + "---|" * (len(BATCHES) + 1),
            *rows("Qwen3-MoE of 32 experts, 16 preferred", str(folder), num_threads, ways),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"to the page {PAGE.name}")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = report(len(usable_cpus()), Path(folder))
    print(text)
    if chosen.write:
        PAGE.write_text(put(PAGE.read_text("utf-8"), text, BEGIN, END), "utf-8")


if __name__ == "__main__":
    main()
