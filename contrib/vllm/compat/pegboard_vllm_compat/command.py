"""The command `vllm-compat`: runs scripts and plugin files that were written for vLLM."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from pegboard.errors import UsageError
from pegboard.interfaces.command import CommandSetup
from pegboard_vllm_compat import entry_points, finder

USAGE = """\
usage: pegboard vllm-compat [--shadow] SCRIPT.py [ARGUMENTS ...]
       pegboard vllm-compat serve [MODEL] [FLAGS ...]
       pegboard vllm-compat plugins

Run a Python script that imports vllm, unchanged, on Pegboard; or serve a model with plugin files
that were written for vLLM; or list the installed plugins of vLLM.

  --shadow   run although a real vllm is installed, which the script then does not see"""
PLUGINS_USAGE = """\
usage: pegboard vllm-compat plugins

List the installed plugins of vLLM, and what is done with them."""


class VllmCommand:
    """Implements `pegboard.interfaces.command.Command`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._setup = setup

    def run(self, words: Sequence[str]) -> int:
        """See `Command.run`."""
        if words and words[0] == "serve":
            from pegboard_vllm_compat.serve import run_serve

            return run_serve(words[1:], self._setup)
        return run_words(words)


def run_words(words: Sequence[str]) -> int:
    """Run a command line without the server, and return the exit status. Raises UsageError."""
    rest = list(words)
    if rest[:1] == ["plugins"]:
        return list_plugins(rest[1:])
    shadow = rest[:1] == ["--shadow"]
    if shadow:
        del rest[0]
    if rest and rest[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"expected the path of a script, got {rest[0] if rest else 'nothing'}")
    path = Path(rest[0])
    prepare(path, rest[1:], shadow=shadow)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception:  # noqa: BLE001
        # an error of the script is shown as Python shows it
        traceback.print_exc()
        return 1
    return 0


def list_plugins(words: Sequence[str]) -> int:
    """Print the installed plugins of vLLM. Raises UsageError for any other word than --help."""
    if words and words[0] not in ("-h", "--help"):
        raise UsageError(f"plugins takes no {words[0]}")
    print(PLUGINS_USAGE if words else entry_points.table())
    return 0


def prepare(path: Path, arguments: Sequence[str], *, shadow: bool = False) -> None:
    """Make this process ready for a script: the package `vllm`, the general plugins, sys.argv and
    sys.path. Raises UsageError if there is no such file, or if a real vllm is installed and
    `shadow` is not set."""
    if not path.is_file():
        raise UsageError(f"there is no script {path}")
    finder.install(shadow=shadow)
    for _, run in entry_points.general():
        run()
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.parent.absolute())
