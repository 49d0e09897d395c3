"""`pegboard`: finds the command, runs it, and turns what goes wrong into one line and an exit status.

Exit status: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C. Tracebacks only with PEGBOARD_LOG_LEVEL=DEBUG.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

OWN = {
    "plugins": "what is installed, what would be chosen and why, what is wrong",
    "collect-env": "report versions, machine and plugins, for a bug report",
    "help": "explain a command, a setting or a plugin's options",
}
"""Commands of core → one line for the list. All others are plugins of the kind `command`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        return 1
    except Exception as error:  # our own errors become one line; a type checked below, so that `--help` imports no error tree
        from pegboard.errors import PegboardError

        if not isinstance(error, PegboardError) or _is_debug():
            raise
        from pegboard.cli.usage import UsageError

        print(f"pegboard: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("-v", "--version"):
        from pegboard import __version__

        print(f"pegboard {__version__}")
        return 0
    if command in ("-h", "--help"):
        print(overview())
        return 0 if arguments else 2
    if command == "plugins":
        return _run_plugins(arguments)
    if command == "collect-env":
        from pegboard.cli import collect_env

        return collect_env.main(arguments[1:])
    if command == "help":
        from pegboard.cli import help_command

        return help_command.main(arguments[1:])
    return _run_plugin(command, arguments[1:])


def overview() -> str:
    """What `pegboard --help` prints."""
    from pegboard.plugins.discovery import scan, summary

    listed: dict[str, list[str]] = {}
    for entry in scan().entries:
        if entry.kind == "command":
            listed.setdefault(entry.distribution, []).append(entry.name)
    texts = {", ".join(words): summary(distribution) for distribution, words in listed.items()} | OWN
    width = max(map(len, texts))
    lines = [f"  {name:<{width}}  {text}" for name, text in texts.items()]
    return "\n".join(
        [
            "usage: pegboard COMMAND [...]",
            "",
            "LLM inference and serving made of plugins.",
            "",
            *lines,
            "",
            "pegboard COMMAND --help explains a command, pegboard --version tells the version.",
        ]
    )


def _run_plugins(arguments: list[str]) -> int:
    """The plugins command, under the plugin rules of the PEGBOARD_CONFIG file."""
    from pegboard.cli import plugins_command
    from pegboard.cli.flags import FlagParser, config_layers
    from pegboard.config.sources import settings_from

    parser = FlagParser(prog="pegboard")
    plugins_command.add_parser(parser.add_subparsers())
    parsed = parser.parse(arguments)
    layers = config_layers(None)
    return plugins_command.run(parsed, settings_from(layers).plugins if layers else None)


def commands() -> list[str]:
    """Every word that is a command here."""
    from pegboard.plugins.discovery import scan

    return [*(entry.name for entry in scan().entries if entry.kind == "command"), *OWN]


def _run_plugin(word: str, arguments: list[str]) -> int:
    """A command that a plugin provides, or the error for an unknown one."""
    from pegboard.cli.flags import config_layers
    from pegboard.cli.usage import UsageError
    from pegboard.config.sources import settings_from
    from pegboard.interfaces.command import CommandSetup
    from pegboard.plugins.defaults import provider
    from pegboard.plugins.names import did_you_mean
    from pegboard.plugins.policy import PluginPolicy
    from pegboard.plugins.registry import Registry

    layers = config_layers(None)
    registry = Registry.discover(PluginPolicy.from_config(settings_from(layers).plugins if layers else None))
    if word not in registry.names("command") and provider("command", word) is None:
        known = commands()
        raise UsageError(f"there is no command {word!r}{did_you_mean(word, known)}; there are {', '.join(known)}")
    return int(registry.build(registry.find("command", word), CommandSetup(word)).run(arguments))


def _is_debug() -> bool:
    from pegboard import env
    from pegboard.errors import ConfigError

    try:
        return env.log_level() == "DEBUG"
    except ConfigError:
        return False


if __name__ == "__main__":
    sys.exit(main())
