"""Kind `command`: one word of the command line, `pegboard WORD …`. Keyed by that word. Runs in the
process that was started.

`pegboard --help` lists the commands from package metadata alone: a command's line is its
distribution's summary. A command may use `pegboard.LLM` and `pegboard.AsyncLLM` (both have
`from_settings`) and the package `pegboard_server`. Its setup has everything else that it needs from
Pegboard.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec(Spec):
    """Entry-point name: the word that is typed. "plugins-WORD" is typed as
    `pegboard plugins WORD`."""


class FlagParser(Protocol):
    """An `argparse.ArgumentParser` with Pegboard's rules. Flags cannot be abbreviated, and `_` in a
    flag name means `-`. Wrong usage raises UsageError, which names the nearest flag. A flag of
    `type="number"` takes 4096, 4k or 4K."""

    def add_argument(self, *names: str, **form: Any) -> Any:
        """The same as in argparse, as is `add_argument_group`."""

    def add_argument_group(self, title: str) -> Any: ...

    def add_settings(
        self, *sections: str, only: Mapping[str, Collection[str]] | None = None
    ) -> None:
        """Add MODEL, --config and one flag per setting of these sections ("engine", "server",
        "plugins"), also under vLLM's names. only: the wanted settings of a section; a section that
        is not in it gets all flags."""

    def parse(self, words: Sequence[str]) -> Namespace:
        """Parse a command line without settings."""

    def parse_settings(
        self, words: Sequence[str], defaults: Mapping[str, Mapping[str, Any]] | None = None
    ) -> tuple["Settings", Namespace]:
        """Parse a command line with settings. Values on the command line win over config files, and
        these win over `defaults`, which are the command's own (section → setting → value). Raises
        ConfigError."""


@dataclass(frozen=True, slots=True)
class CommandSetup:
    """What a command is given.

    word: the word that was typed. parser: makes a parser and takes the arguments of
    `argparse.ArgumentParser`. tokenizer: returns the tokenizer of a model reference. model_files:
    returns the checkpoint's files, after downloading the model if necessary. Both raise
    PegboardError.
    """

    word: str
    parser: Callable[..., FlagParser]
    tokenizer: Callable[[str], "Tokenizer"]
    model_files: Callable[["Settings"], list[Path]]


class Command(Protocol):
    def run(self, words: Sequence[str]) -> int:
        """Run the command with the words after its own and return the exit status. If it raises
        PegboardError, one line is printed on stderr and the status is 1; for UsageError the status
        is 2."""
