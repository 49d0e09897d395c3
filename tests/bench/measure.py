"""The measurements: every side in turn, then every server, then the parts of Pegboard's steps."""

from __future__ import annotations

import sys
import time
from typing import Any

import workload
from peers import Peers
from servers import Server, ServerFailed, measure_server, median_of
from side import Side, SideFailed

CLIENTS = (1, 2, 4, 8, 16, 32)
QUICK_CLIENTS = (1, 4)
SERVING_CLIENTS = 8

Names = list[tuple[str, str]]
"""(name, format) of each side or server."""


def measure_sides(
    peers: Peers, wanted: Names, num_rounds: int, quick: bool, failed: dict[str, str]
) -> dict[str, Any]:
    """Measure all sides. Returns the numbers by the side's name. A peer that fails is listed in
    `failed` with its reason. Pegboard must not fail."""
    sides: list[Side] = []
    try:
        for name, format in wanted:
            try:
                sides.append(peers.start(name, format))
            except SideFailed as error:
                if name == "pegboard":
                    raise
                failed[f"{name} {format}"] = str(error)
                note(f"{name} {format} is left out: {error}")
                continue
            note(f"{sides[-1].name}: first token after {sides[-1].start_s:.1f} s")
        return _rounds(sides, num_rounds, quick, failed)
    finally:
        for side in sides:
            side.stop()


def _rounds(
    sides: list[Side], num_rounds: int, quick: bool, failed: dict[str, str]
) -> dict[str, Any]:
    """Every round has new work, the same for all sides, so that no prefix cache helps
    unintentionally. The first round is small and serves as a warm-up."""
    kept: dict[Side, list[dict[str, dict[str, float]]]] = {side: [] for side in sides}
    for index in range(num_rounds + 1):
        for side in list(kept):
            started = time.perf_counter()
            try:
                numbers = _round(side, index, quick or index == 0)
            except SideFailed as error:
                if side.name.startswith("pegboard"):
                    raise
                failed[side.name] = str(error)
                del kept[side]
                note(f"{side.name} is left out: {error}")
                continue
            if index:
                kept[side].append(numbers)
            note(
                f"{f'round {index}' if index else 'warm-up'} {side.name}: "
                f"{time.perf_counter() - started:.1f} s"
            )
    return {
        side.name: {
            "start_to_first_token_s": side.start_s,
            **{part: median_of([numbers[part] for numbers in rounds]) for part in rounds[0]},
            "peak_rss_mib": side.peak_rss_mib(),
            "rounds": rounds,
        }
        for side, rounds in kept.items()
    }


def _round(side: Side, index: int, quick: bool) -> dict[str, dict[str, float]]:
    """One turn of one side. Raises SideFailed."""
    stream = side.ask(workload.single(100 + index, quick).job("stream"))
    many = workload.mixed(200 + index, quick)
    seconds = side.ask(many.job("generate"))["seconds"]
    numbers = {
        "single": stream,
        "offline": {"tokens_per_s": many.num_output_tokens / seconds, "seconds": seconds},
    }
    if not side.name.endswith("q4_0"):
        cold, warm = workload.shared_prefix(300 + index, quick)
        numbers["prefix"] = {
            "cold_s": side.ask(cold.job("generate"))["seconds"],
            "warm_s": side.ask(warm.job("generate"))["seconds"],
        }
    return numbers


def measure_servers(
    peers: Peers, num_rounds: int, quick: bool, failed: dict[str, str]
) -> dict[str, Any]:
    """Measure all servers. Returns the numbers by the server's name and format. One server runs at
    a time. It is restarted in every round, so start-up time and memory are medians too. The curve
    over the number of clients is measured once, for the first format. quick: only that format."""
    found: dict[str, list[dict[str, Any]]] = {}
    wanted = [(name, format) for name, format in peers.serving() if format == "q4_1" or not quick]
    for index in range(1, num_rounds + 1):
        for name, format in wanted:
            label = f"{name} {format}"
            if label in failed:
                continue
            try:
                found.setdefault(label, []).append(_serve(peers, name, format, index, quick))
            except ServerFailed as error:
                if name == "pegboard":
                    raise
                failed[label] = str(error)
                found.pop(label, None)
                note(f"{label} is left out: {error}")
                continue
            note(
                f"round {index} server {label}: first token after "
                f"{found[label][-1]['first_token_s']:.1f} s"
            )
    numbers = {label: _server_medians(rounds) for label, rounds in found.items()}
    for name, format in wanted:
        if format == "q4_1" and f"{name} {format}" in numbers:
            note(f"server {name}: over the number of clients")
            numbers[f"{name} {format}"]["curve"] = _curve(peers, name, format, quick)
    return numbers


def _serve(peers: Peers, name: str, format: str, index: int, quick: bool) -> dict[str, Any]:
    """Measure one server from its start to its end."""
    server = peers.serve(name, format, SERVING_CLIENTS)
    try:
        server.load(workload.ramp(400 + index, 1, quick=True), 1)
        load = measure_server(server, workload.mixed(500 + index, quick), SERVING_CLIENTS)
    finally:
        server.stop()
    return {"health_s": server.health_s, "first_token_s": server.first_token_s, "load": load}


def _server_medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    starts = median_of(
        [{key: numbers[key] for key in ("health_s", "first_token_s")} for numbers in rounds]
    )
    return {**starts, "load": median_of([numbers["load"] for numbers in rounds]), "rounds": rounds}


def _curve(peers: Peers, name: str, format: str, quick: bool) -> dict[str, dict[str, float]]:
    """Returns the loads by the number of clients."""
    clients = QUICK_CLIENTS if quick else CLIENTS
    server: Server = peers.serve(name, format, clients[-1])
    try:
        server.load(workload.ramp(600, 1, quick=True), 1)
        return {
            str(count): server.load(workload.ramp(600 + count, count, quick), count)
            for count in clients
        }
    finally:
        server.stop()


def measure_host(peers: Peers, quick: bool) -> dict[str, Any]:
    """Returns the parts of Pegboard's decode steps by batch size, on the Q4_1 file."""
    note("parts of a decode step")
    side = peers.start("pegboard", "q4_1")
    try:
        return {
            str(size): side.ask(workload.steady(size, size, quick).job("shares"))
            for size in (1, 32)
        }
    finally:
        side.stop()


def note(text: str) -> None:
    """Print progress to stderr."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)
