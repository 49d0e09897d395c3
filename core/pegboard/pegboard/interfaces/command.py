"""Kind `command`: one word of the command line, `pegboard WORD …`. Keyed by the word that is typed; runs in the caller's process.

`pegboard --help` lists commands by package metadata alone: the line of a command is its distribution's summary. A command may use
`pegboard.LLM`, `pegboard.AsyncLLM` (both have `from_settings`) and the package `pegboard_server`; its setup has everything else
that it needs of Pegboard.
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
    """Entry-point name: the word that is typed."""


class FlagParser(Protocol):
    """An `argparse.ArgumentParser` with Pegboard's rules: no abbreviations, `_` is `-` in flag names, and wrong usage raises
    UsageError that names the nearest flag. A flag of `type="number"` takes 4096, 4k or 4K."""

    def add_argument(self, *names: str, **form: Any) -> Any:
        """As in argparse, like `add_argument_group`."""

    def add_argument_group(self, title: str) -> Any: ...

    def add_settings(self, *sections: str, only: Mapping[str, Collection[str]] | None = None) -> None:
        """Add MODEL, --config and a flag per setting of these sections ("engine", "server", "plugins"), under vLLM's names too.
        only: section → the settings of it that are wanted."""

    def parse(self, words: Sequence[str]) -> Namespace:
        """Parse a command line without settings."""

    def parse_settings(
        self, words: Sequence[str], defaults: Mapping[str, Mapping[str, Any]] | None = None
    ) -> tuple["Settings", Namespace]:
        """Parse a command line with settings. They come from it, from the config files and from `defaults` (the command's own:
        section → setting → value), which are the weakest. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class CommandSetup:
    """What a command is given.

    word: the one that was typed. parser: makes the parser; takes what `argparse.ArgumentParser` takes. tokenizer: of a model
    reference. model_files: the checkpoint's files; fetches the model where it is not here yet. Both raise PegboardError.
    """

    word: str
    parser: Callable[..., FlagParser]
    tokenizer: Callable[[str], "Tokenizer"]
    model_files: Callable[["Settings"], list[Path]]


class Command(Protocol):
    def run(self, words: Sequence[str]) -> int:
        """Run with the words after the command's own; returns the exit status. A PegboardError becomes one line on stderr and
        status 1, a UsageError status 2."""
