"""The command passes the contract tests of its kind and of all plugins."""

from __future__ import annotations

from pegboard_command_bench.command import Bench

from pegboard.interfaces.command import Command, CommandSetup
from pegboard_testing.contract_command import CommandContract
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("command", "bench"))


class TestBench(CommandContract):
    word = "bench"
    forms = (("latency",), ("throughput",), ("serve",), ("startup",))

    def command(self, setup: CommandSetup) -> Command:
        return Bench(None, setup)
