"""Contract tests of the kind `command`. A plugin's test file:

class TestGreet(CommandContract):
    def command(self, setup: CommandSetup) -> Command:
        return Greet(None, setup)
"""

from __future__ import annotations

import pytest

from pegboard.cli.main import command_setup
from pegboard.errors import UsageError
from pegboard.interfaces.command import Command, CommandSetup

__all__ = ["CommandContract", "command_setup"]


class CommandContract:
    """Every command passes these. Override `command`. word: the word that the user types. forms:
    the words of each sub-command; (()) = there are no sub-commands."""

    word = "word"
    forms: tuple[tuple[str, ...], ...] = ((),)

    def command(self, setup: CommandSetup) -> Command:
        """Return a new command."""
        raise NotImplementedError

    def test_help_explains_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        """--help prints the usage and exits with status 0."""
        for form in self.forms:
            try:
                status = self.command(command_setup(self.word)).run([*form, "--help"])
            except SystemExit as ended:
                status = int(ended.code or 0)
            shown = capsys.readouterr().out
            assert status == 0 and " ".join(["usage: pegboard", self.word, *form]) in shown, (
                f"{form}: {status}\n{shown}"
            )

    def test_an_unknown_flag_is_wrong_usage(self) -> None:
        """The error names the unknown flag, and nothing runs."""
        for form in self.forms:
            with pytest.raises(UsageError, match="--no-such-flag-of-pegboard"):
                self.command(command_setup(self.word)).run([*form, "--no-such-flag-of-pegboard"])
