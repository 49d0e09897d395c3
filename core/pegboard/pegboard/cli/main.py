"""The program `pegboard`: finds and runs the command, and turns an error into one line and an exit
status.

The exit status is 0; 2 for a mistake in the command line or the settings; 1 for any other error;
130 after Ctrl-C. Tracebacks are shown only with PEGBOARD_LOG_LEVEL=DEBUG.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard.config.schema import Settings
    from pegboard.interfaces.command import CommandSetup
    from pegboard.interfaces.tokenizer import Tokenizer

OWN = {
    "plugins": "list the installed plugins",
}
"""Core's own commands → their line in the list of commands. All other commands are plugins of the
kind `command`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the program that reads the output is gone, as with `head`
        sys.stderr.close()
        return 1
    except Exception as error:  # the type is checked below, so `--help` does not import the errors
        from pegboard.errors import ConfigError, PegboardError

        if not isinstance(error, PegboardError) or _is_debug():
            raise
        print(f"pegboard: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command in ("-v", "--version"):
        from pegboard import __version__

        print(f"pegboard {__version__}")
        return 0
    if command in ("-h", "--help"):
        print(overview())
        return 0 if words else 2
    if command == "plugins":
        from pegboard.plugins.defaults import provider

        action = "-".join(words[:2])  # "plugins-doctor"
        if action not in commands() and provider("command", action) is None:
            return _list_plugins(words[1:])
        command = action
        words = words[1:]
    return _run_plugin(command, words[1:])


def overview() -> str:
    """Return the text of `pegboard --help`."""
    from pegboard.plugins.discovery import scan

    listed: dict[str, list[str]] = {}
    for entry in scan().entries:
        if entry.kind == "command":
            listed.setdefault(entry.distribution, []).append(entry.name)
    texts = {
        _typed(words): scan().summaries[distribution] for distribution, words in listed.items()
    }
    texts["plugins list"] = OWN["plugins"]
    width = max(map(len, texts))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in texts.items())
    return (
        "usage: pegboard COMMAND [...]\n\nLLM inference and serving made of "
        f"plugins.\n\n{lines}\n\n"
        "pegboard COMMAND --help explains a command, pegboard --version tells the version."
    )


def _typed(words: Sequence[str]) -> str:
    """Return commands as they are typed: "plugins-show" and "plugins-why" are `plugins
    show|why`."""
    return ", ".join(words).replace("plugins-", "plugins ", 1).replace(", plugins-", "|")


def commands() -> list[str]:
    """Return the names of all commands, core's and those of plugins."""
    from pegboard.plugins.discovery import scan

    return [*dict.fromkeys(entry.name for entry in scan().entries if entry.kind == "command"), *OWN]


def _list_plugins(words: Sequence[str]) -> int:
    """Run `pegboard plugins list`. It reads package metadata only and never runs a plugin's
    code."""
    import json

    from pegboard.cli.flags import FlagParser
    from pegboard.config.sources import plugin_config
    from pegboard.plugins.discovery import HOOKS_KIND
    from pegboard.plugins.names import check_kind
    from pegboard.plugins.registry import Registry

    actions = [
        "list",
        *(name.removeprefix("plugins-") for name in commands() if name.startswith("plugins-")),
    ]
    parser = FlagParser(
        prog="pegboard plugins",
        description="List the installed plugins. This runs no code of plugins.",
    )
    parser.add_argument(
        "action",
        choices=actions,
        help="list, or another command about plugins, which has its own --help",
    )
    parser.add_argument("--kind", help="only this kind")
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="machine-readable output"
    )
    arguments = parser.parse(words)
    kind = arguments.kind
    if kind not in (None, HOOKS_KIND):
        check_kind(kind)
    rows = [
        row for row in Registry.discover(plugin_config()).describe() if kind in (None, row["kind"])
    ]
    if arguments.as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    if not rows:
        print(
            "no plugins are installed"
            if kind is None
            else f"no plugins of kind {kind!r} are installed"
        )
        return 0
    table = [("KIND", "NAME", "DISTRIBUTION", "VERSION", "")]
    for row in rows:
        state = row["reason"] or row["outdated"] or ("" if row["enabled"] else "not enabled")
        table.append((row["kind"], row["name"], row["distribution"], row["version"], state))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print(
            "  ".join(
                f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)
            ).rstrip()
        )
    return 0


def _run_plugin(word: str, words: list[str]) -> int:
    """Run a command that a plugin provides. Raises UsageError if it is unknown. An allow list does
    not apply to commands, because the user types the command."""
    from msgspec import structs

    from pegboard.config.sources import plugin_config
    from pegboard.errors import UsageError, did_you_mean
    from pegboard.plugins.defaults import provider
    from pegboard.plugins.registry import Registry

    registry = Registry.discover(structs.replace(plugin_config(), allow=None))
    known = commands()
    if word.rpartition(":")[2] not in known and provider("command", word) is None:
        raise UsageError(
            f"there is no command {word!r}{did_you_mean(word, known)}; there are {', '.join(known)}"
        )
    return int(
        registry.build(registry.find("command", word), command_setup(word.rpartition(":")[2])).run(
            words
        )
    )


def command_setup(word: str) -> "CommandSetup":
    """Return the setup of the command `word`."""
    from pegboard.cli.flags import FlagParser
    from pegboard.interfaces.command import CommandSetup

    return CommandSetup(word, FlagParser, _tokenizer, _model_files)


def _tokenizer(reference: str) -> "Tokenizer":
    from pegboard.config.sources import engine_settings
    from pegboard.plan.engine_plan import make_tokenizer, resolve

    plan, registry = resolve(engine_settings(reference, {}))
    return make_tokenizer(registry, plan)


def _model_files(settings: "Settings") -> "list[Path]":
    from pegboard.plan.engine_plan import resolve

    root = resolve(settings)[0].checkpoint.path
    return [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]


def _is_debug() -> bool:
    from pegboard import env
    from pegboard.errors import ConfigError

    try:
        return env.log_level() == "DEBUG"
    except ConfigError:
        return False


if __name__ == "__main__":
    sys.exit(main())
