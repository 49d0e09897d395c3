"""`pegboard bench WHAT`: finds the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from pegboard.cli.usage import UsageError
from pegboard.interfaces.command import CommandSetup
from pegboard.plugins.names import did_you_mean

MEASUREMENTS = {
    "latency": "seconds for one batch of equal requests, in this process",
    "throughput": "tokens per second for many requests at once, in this process",
    "serve": "a running server under load: time to first token, between tokens, throughput",
    "startup": "seconds until a model is loaded, in fresh processes",
}
"""Measurement → one line for the list."""


class Bench:
    """The command, as core builds it."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        pass

    def run(self, arguments: Sequence[str]) -> int:
        return main(arguments)


def main(argv: Sequence[str]) -> int:
    """Run one measurement. Raises UsageError."""
    what = argv[0] if argv else "--help"
    if what in ("-h", "--help"):
        lines = [f"  {name:<11} {text}" for name, text in MEASUREMENTS.items()]
        print("\n".join(["usage: pegboard bench WHAT [...]", "", *lines, "", "pegboard bench WHAT --help explains one."]))
        return 0 if argv else 2
    if what not in MEASUREMENTS:
        raise UsageError(f"there is no bench {what!r}{did_you_mean(what, MEASUREMENTS)}; there are {', '.join(MEASUREMENTS)}")
    return int(import_module(f"pegboard_command_bench.{what}").main(argv[1:]))
