"""The command passes the contract tests of its kind and of all plugins."""

from __future__ import annotations

from pegboard_command_run_batch.command import RunBatch

from pegboard.interfaces.command import Command, CommandSetup
from pegboard_testing.contract_command import CommandContract
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("command", "run-batch"))


class TestRunBatch(CommandContract):
    word = "run-batch"

    def command(self, setup: CommandSetup) -> Command:
        return RunBatch(None, setup)
