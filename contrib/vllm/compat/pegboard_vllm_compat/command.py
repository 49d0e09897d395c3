"""The command `vllm-compat`: runs a script against the package `vllm` that this distribution provides."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from pegboard.errors import UsageError
from pegboard.interfaces.command import CommandSetup
from pegboard_vllm_compat import finder

USAGE = """\
usage: pegboard vllm-compat [--shadow] SCRIPT.py [ARGUMENTS ...]

Run a Python script that imports vllm, unchanged, on Pegboard.

  --shadow   run although a real vllm is installed, which the script then does not see"""


class VllmCommand:
    """Implements `pegboard.interfaces.command.Command`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._setup = setup

    def run(self, words: Sequence[str]) -> int:
        """See `Command.run`."""
        return run_words(words)


def run_words(words: Sequence[str]) -> int:
    """Run a command line and return the exit status. Raises UsageError, and what the script
    raises."""
    rest = list(words)
    shadow = rest[:1] == ["--shadow"]
    if shadow:
        del rest[0]
    if rest and rest[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"expected the path of a script, got {rest[0] if rest else 'nothing'}")
    run_script(Path(rest[0]), rest[1:], shadow=shadow)
    return 0


def run_script(path: Path, arguments: Sequence[str], *, shadow: bool = False) -> None:
    """Run a script as Python would, with the package `vllm` of this distribution. Raises UsageError
    if there is no such file, or if a real vllm is installed and `shadow` is not set."""
    if not path.is_file():
        raise UsageError(f"there is no script {path}")
    finder.install(shadow=shadow)
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.parent.absolute())
    runpy.run_path(str(path), run_name="__main__")
