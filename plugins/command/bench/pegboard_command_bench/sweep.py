"""`pegboard bench sweep serve`: starts a server for each set of its parameters, and measures it
with each set of parameters of the load. `plot` and `plot_pareto` draw the results.

The results are in OUTPUT/TIME/COMBINATION/run=N.json, as `pegboard bench serve` writes them, and
all together, with their parameters, in OUTPUT/TIME/summary.json.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from pegboard.errors import PegboardError, UsageError, did_you_mean
from pegboard.interfaces.command import CommandSetup, FlagParser

ACTIONS = {
    "serve": "measure a server with each set of parameters",
    "plot": "draw a result over a parameter",
    "plot_pareto": "draw the throughput of the machine over that of a user",
}
PATIENCE_S = 600
"""How long a server may take to load its model, and to stop."""

Parameters = Mapping[str, Any]
"""Name of a flag, with `_` or `-` → value."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One set of parameters of the server and one of the load. number: of the run."""

    serve: Parameters
    bench: Parameters
    number: int

    @property
    def name(self) -> str:
        """The name of the folder: vLLM's form, without characters that a file cannot have."""
        parts = []
        for title, values in (("SERVE", self.serve), ("BENCH", self.bench)):
            parts.append("-".join([f"{title}-", *(f"{k}={v}" for k, v in values.items())]))
        text = "-".join(parts)
        return "".join(letter if letter.isalnum() or letter in "-_=." else "_" for letter in text)

    def file(self, folder: Path) -> Path:
        """Return where the result of the run is."""
        return folder / self.name / f"run={self.number}.json"


def main(words: Sequence[str], setup: CommandSetup) -> int:
    """Run one of the actions. Raises UsageError."""
    action = words[0] if words else "--help"
    if action in ("-h", "--help"):
        lines = [f"  {name:<12} {text}" for name, text in ACTIONS.items()]
        print("\n".join(["usage: pegboard bench sweep WHAT [...]", "", *lines]))
        return 0 if words else 2
    if action not in ACTIONS:
        raise UsageError(
            f"there is no sweep {action!r}{did_you_mean(action, ACTIONS)}; there are "
            f"{', '.join(ACTIONS)}"
        )
    if action == "serve":
        return _serve(make_parser(setup).parse(words[1:]))
    plots = import_module("pegboard_command_bench.sweep_plots")
    return int(getattr(plots, action)(words[1:], setup))


def make_parser(setup: CommandSetup) -> FlagParser:
    """Return the parser of `bench sweep serve`."""
    parser = setup.parser(
        prog="pegboard bench sweep serve",
        description="Start a server for each set of parameters, and measure it under each load.",
    )
    parser.add_argument(
        "--serve-cmd", required=True, metavar="COMMAND", help="starts a server: pegboard serve …"
    )
    parser.add_argument(
        "--bench-cmd", required=True, metavar="COMMAND", help="measures: pegboard bench serve …"
    )
    parser.add_argument("--after-bench-cmd", metavar="COMMAND", help="run after each measurement")
    for name, whose in (("serve", "the server"), ("bench", "the load")):
        parser.add_argument(
            f"--{name}-params",
            metavar="FILE",
            help=f"JSON: a list of sets of flags of {whose}, or a mapping of them by name",
        )
    parser.add_argument(
        "--link-vars",
        default="",
        metavar="A=B,…",
        help="only combinations where parameter A of the server is parameter B of the load",
    )
    parser.add_argument(
        "-o", "--output-dir", default="results", metavar="FOLDER", help="(default %(default)s)"
    )
    parser.add_argument(
        "--num-runs", type="number", default=3, help="of each combination (default %(default)s)"
    )
    parser.add_argument("--resume", metavar="TIME", help="the folder of a sweep to go on with")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    return parser


def _serve(arguments: Namespace) -> int:
    groups = combinations(
        parameters(arguments.serve_params),
        parameters(arguments.bench_params),
        links(arguments.link_vars),
        arguments.num_runs,
    )
    folder = Path(arguments.output_dir) / (arguments.resume or f"{datetime.now():%Y%m%d_%H%M%S}")
    if arguments.resume and not folder.is_dir():
        raise UsageError(f"--resume {arguments.resume}: there is no folder {folder}")
    for serve, group in groups:
        missing = [each for each in group if not each.file(folder).is_file()]
        port = port_of(arguments.serve_cmd, serve)
        command = [*shlex.split(arguments.serve_cmd), *flags({**serve, "port": port})]
        loads = [(each, bench_command(arguments.bench_cmd, each, port, folder)) for each in missing]
        if arguments.dry_run:
            print("\n".join(map(shlex.join, [command, *(load for _, load in loads)])))
        elif loads:
            with server(command) as process:
                for each, load in loads:
                    _measure(each, load, folder, process)
                    if arguments.after_bench_cmd:
                        _run(shlex.split(arguments.after_bench_cmd))
    if not arguments.dry_run:
        every = [each for _, group in groups for each in group]
        write_summary(folder, every)
        print(f"{len(every)} results: {folder / 'summary.json'}")
    return 0


def parameters(file: str | None) -> list[Parameters]:
    """Read sets of parameters. Raises UsageError if the file is not of the form."""
    if file is None:
        return [{}]
    try:
        content = json.loads(Path(file).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    sets = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(sets, list) or not all(isinstance(each, dict) for each in sets) or not sets:
        raise UsageError(
            f'{file}: expected a list of sets of flags, as in [{{"max_num_seqs": 8}}], or a '
            "mapping of such sets by name"
        )
    return sets


def links(text: str) -> list[tuple[str, str]]:
    """Return the pairs of --link-vars. Raises UsageError."""
    pairs = []
    for part in filter(None, text.split(",")):
        one, equals, other = part.partition("=")
        if not (one and equals and other):
            raise UsageError(f"--link-vars {part!r}: expected NAME=NAME")
        pairs.append((one.strip(), other.strip()))
    return pairs


def combinations(
    serve: Sequence[Parameters],
    bench: Sequence[Parameters],
    pairs: Sequence[tuple[str, str]],
    num_runs: int,
) -> list[tuple[Parameters, list[Combination]]]:
    """Return what to measure, by the parameters of the server. Raises UsageError if there is
    nothing."""
    groups = []
    for one in serve:
        fitting = [
            other
            for other in bench
            if all(_value(one, name) == _value(other, linked) for name, linked in pairs)
        ]
        runs = itertools.product(fitting, range(num_runs))
        if group := [Combination(one, other, number) for other, number in runs]:
            groups.append((one, group))
    if not groups:
        raise UsageError("no combination is left to measure: see --link-vars and --num-runs")
    files = Counter(each.file(Path()) for _, group in groups for each in group)
    if twice := [file for file, count in files.items() if count > 1]:
        raise UsageError(f"two combinations would write {twice[0]}: give each set other values")
    return groups


def _value(values: Parameters, name: str) -> Any:
    plain = {key.replace("-", "_"): value for key, value in values.items()}
    return plain.get(name.replace("-", "_"))


def flags(values: Parameters) -> list[str]:
    """Return parameters as words of a command line."""
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def port_of(command: str, values: Parameters) -> int:
    """Return the port that a server is told to use, or a free one."""
    words = shlex.split(command)
    if port := _value(values, "port"):
        return int(port)
    if "--port" in words[:-1]:
        return int(words[words.index("--port") + 1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def bench_command(command: str, each: Combination, port: int, folder: Path) -> list[str]:
    """Return the command that measures a combination and saves the result. It waits for the
    server."""
    file = each.file(folder)
    saved = {"save_result": True, "result_dir": str(file.parent), "result_filename": file.name}
    given = {"port": port, "ready_check_timeout_sec": PATIENCE_S, **each.bench, **saved}
    return [*shlex.split(command), *flags(given)]


@contextmanager
def server(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, and stop it and its processes with the block."""
    print(f"$ {shlex.join(command)}", file=sys.stderr)
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _measure(
    each: Combination, command: Sequence[str], folder: Path, process: "subprocess.Popen[bytes]"
) -> None:
    file = each.file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(command) as bench:
        while bench.poll() is None:
            if (status := process.poll()) is not None:
                bench.kill()
                raise PegboardError(f"the server ended with status {status}: {each.name}")
            try:
                bench.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
    if bench.returncode or not file.is_file():
        raise PegboardError(
            f"the measurement ended with status {bench.returncode}: {shlex.join(command)}"
        )


def _run(command: Sequence[str]) -> None:
    if status := subprocess.run(command, check=False).returncode:
        raise PegboardError(f"{shlex.join(command)} ended with status {status}")


def write_summary(folder: Path, every: Sequence[Combination]) -> None:
    """Write all results with their parameters to one file."""
    rows = [
        {
            **{
                name.replace("-", "_"): value
                for name, value in {**each.serve, **each.bench}.items()
            },
            "run_number": each.number,
            **json.loads(each.file(folder).read_text("utf-8")),
        }
        for each in every
    ]
    (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
