"""What every command must do. A plugin's test:

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
    """Subclass with `command`. word: what is typed. forms: words that choose a sub-command; (()) = there is none."""

    word = "word"
    forms: tuple[tuple[str, ...], ...] = ((),)

    def command(self, setup: CommandSetup) -> Command:
        """A new command."""
        raise NotImplementedError

    def test_help_explains_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        """--help prints how it is used and ends with status 0."""
        for form in self.forms:
            try:
                status = self.command(command_setup(self.word)).run([*form, "--help"])
            except SystemExit as ended:
                status = int(ended.code or 0)
            shown = capsys.readouterr().out
            assert status == 0 and " ".join(["usage: pegboard", self.word, *form]) in shown, f"{form}: {status}\n{shown}"

    def test_an_unknown_flag_is_wrong_usage(self) -> None:
        """It is named, and nothing runs."""
        for form in self.forms:
            with pytest.raises(UsageError, match="--no-such-flag-of-pegboard"):
                self.command(command_setup(self.word)).run([*form, "--no-such-flag-of-pegboard"])
