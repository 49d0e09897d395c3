"""`pegboard bench WHAT`: selects the measurement and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from pegboard.errors import UsageError
from pegboard.interfaces.command import CommandSetup

MEASUREMENTS = {
    "latency": "seconds for one batch of equal requests, in this process",
    "throughput": "tokens per second for many requests at once, in this process",
    "serve": "a running server under load: time to first token, between tokens, throughput",
    "startup": "seconds until a model is loaded, in fresh processes",
    "sweep": "a server with each set of parameters, and pictures of the results",
}
"""Maps each measurement to its line in the list."""


class Bench:
    """The command `bench`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._setup = setup

    def run(self, words: Sequence[str]) -> int:
        """Run one measurement. Raises UsageError."""
        what = words[0] if words else "--help"
        if what in ("-h", "--help"):
            lines = [f"  {name:<11} {text}" for name, text in MEASUREMENTS.items()]
            print(
                "\n".join(
                    [
                        "usage: pegboard bench WHAT [...]",
                        "",
                        *lines,
                        "",
                        "pegboard bench WHAT --help shows the flags of one.",
                    ]
                )
            )
            return 0 if words else 2
        if what not in MEASUREMENTS:
            near = get_close_matches(what, MEASUREMENTS, 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise UsageError(
                f"there is no bench {what!r}{hint}; there are {', '.join(MEASUREMENTS)}"
            )
        return int(import_module(f"pegboard_command_bench.{what}").main(words[1:], self._setup))
