"""The command passes the contract tests of its kind and of all plugins."""

from __future__ import annotations

import pytest
from pegboard_command_run_batch.command import RunBatch

from pegboard.errors import UsageError
from pegboard.interfaces.command import Command, CommandSetup
from pegboard_testing.contract_command import CommandContract, command_setup
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("command", "run-batch"))


class TestRunBatch(CommandContract):
    word = "run-batch"

    def command(self, setup: CommandSetup) -> Command:
        return RunBatch(None, setup)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--enable-force-include-usage"], "every answer has its usage"),
        (["--port", "1"], "--port needs --enable-metrics"),
        (["--root-path", "/x"], "unknown flag --root-path"),
    ],
)
def test_flags_without_an_effect_are_refused(words, told):
    with pytest.raises(UsageError, match=told):
        RunBatch(None, command_setup("run-batch")).run(["-i", "in", "-o", "out", *words])
