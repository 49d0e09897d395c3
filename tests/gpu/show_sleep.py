"""Shows on a GPU that an engine gives its memory back while it sleeps, and answers as before.

    python tests/gpu/show_sleep.py MODEL [--enforce-eager]

Prints a JSON line for each state: GiB that are free on the device, and whether the tokens are those
before the sleep."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from pegboard import LLM, SamplingParams

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def main():"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def free_gib(llm: LLM) -> float:
    """Return what is free on the device of rank 0."""
    (numbers, *_) = llm.collective_rpc("memory")
    return round(numbers["free"] / 2**30, 3)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def show(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the memory came back and the tokens are the same at both levels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--enforce-eager", action="store_true")
    given = parser.parse_args(arguments)
    is_right = True
    with LLM(
        given.model,
        device=given.device,
        enforce_eager=given.enforce_eager,
        enable_sleep_mode=True,
        enable_prefix_caching=False,
    ) as llm:
        before = tokens(llm)
        awake = free_gib(llm)
        show(state="awake", free_gib=awake)
        for level in (1, 2):
            llm.sleep(level=level)
            asleep = free_gib(llm)
            show(state=f"asleep at level {level}", free_gib=asleep)
            llm.wake_up()
            is_equal = tokens(llm) == before
            show(state="awake again", free_gib=free_gib(llm), equal=is_equal)
            is_right = is_right and is_equal and asleep > awake
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
