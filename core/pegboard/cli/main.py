"""`pegboard`: finds the command, runs it, and turns what goes wrong into one line and an exit status.

Exit status: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C. Tracebacks only with PEGBOARD_LOG_LEVEL=DEBUG.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "chat with a running server",
    "complete": "complete text with a running server",
    "run-batch": "answer the requests of a file in OpenAI's batch format",
    "bench": "measure speed: latency, throughput, serve or startup",
    "collect-env": "report versions, machine and plugins, for a bug report",
    "plugins": "what is installed, what would be chosen and why, what is wrong",
    "help": "explain a command, a setting or a plugin's options",
}
"""Command → one line for the list."""

_FUNCTIONS = {
    "serve": "serve:main",
    "chat": "talk:chat",
    "complete": "talk:complete",
    "run-batch": "run_batch:main",
    "bench": "bench.command:main",
    "collect-env": "collect_env:main",
    "help": "help_command:main",
}
"""Command → module of `pegboard.cli` and function that runs it, given the words behind the command."""


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
    if command in COMMANDS:
        module, _, function = _FUNCTIONS[command].partition(":")
        return int(getattr(import_module(f"pegboard.cli.{module}"), function)(arguments[1:]))
    return _run_added(command, arguments[1:])


def overview() -> str:
    """What `pegboard --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
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
    from pegboard.settings import settings_from

    parser = FlagParser(prog="pegboard")
    plugins_command.add_parser(parser.add_subparsers())
    parsed = parser.parse(arguments)
    layers = config_layers(None)
    return plugins_command.run(parsed, settings_from(layers).plugins if layers else None)


def _run_added(name: str, arguments: list[str]) -> int:
    """A command that an enabled hook plugin adds, or the error for an unknown one."""
    import argparse

    from pegboard.cli.flags import config_layers
    from pegboard.cli.usage import UsageError
    from pegboard.plugins.hooks import Hooks
    from pegboard.plugins.names import did_you_mean
    from pegboard.plugins.policy import PluginPolicy
    from pegboard.plugins.registry import Registry
    from pegboard.settings import settings_from

    registry = Registry.discover(PluginPolicy.from_config(settings_from(config_layers(None)).plugins))
    added = {command.name: command for command in Hooks(registry).cli_commands()} if registry.enabled_hooks() else {}
    if name not in added:
        known = [*COMMANDS, *added]
        raise UsageError(f"there is no command {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    parser = argparse.ArgumentParser(prog=f"pegboard {name}", description=added[name].help, allow_abbrev=False)
    added[name].add_arguments(parser)
    return added[name].run(parser.parse_args(arguments))


def _is_debug() -> bool:
    from pegboard import env
    from pegboard.errors import ConfigError

    try:
        return env.log_level() == "DEBUG"
    except ConfigError:
        return False


if __name__ == "__main__":
    sys.exit(main())
