"""`pegboard help`: explains a command, a setting, a kind of plugin, or the options of a plugin."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.cli.main import commands, main, overview
from pegboard.config.sections import all_settings
from pegboard.config.sources import plugin_config
from pegboard.errors import UsageError, did_you_mean
from pegboard.interfaces import KINDS
from pegboard.interfaces.command import CommandSetup
from pegboard.plugins.options import schema_text
from pegboard.plugins.policy import option_key
from pegboard.plugins.registry import Registry


class Help:
    """The command `help`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard help",
            description=(
                "Explain a command, a setting, a kind of plugin, or the options of a plugin."
            ),
        )
        self._parser.add_argument(
            "what", nargs="?", help="such as serve, max-model-len, sampler or sampler.torch"
        )

    def run(self, words: Sequence[str]) -> int:
        """Return 0. Raises UsageError if nothing is called so."""
        # a setting as it is typed elsewhere
        is_flag = len(words) == 1 and words[0].startswith("--") and words[0] != "--help"
        what = words[0] if is_flag else self._parser.parse(words).what
        if what in (None, "help"):
            print(overview())
        elif what in commands():
            return main([what, "--help"])
        elif (kind := what.replace("-", "_")) in KINDS:
            print(f"{kind}: {KINDS[kind].summary}. Options of one: pegboard help {kind}.NAME\n")
            return main(["plugins", "list", "--kind", kind])
        else:
            print(_options_help(what) if "." in what else _setting_help(what))
        return 0


def _options_help(address: str) -> str:
    kind, name = option_key(address)
    return schema_text(Registry.discover(plugin_config()).find(kind.replace("-", "_"), name))


def _setting_help(word: str) -> str:
    name = word.lstrip("-").replace("-", "_")
    known = all_settings()
    if name not in known:
        near = did_you_mean(name, [*known, *commands(), *KINDS])
        raise UsageError(
            f"nothing is called {word!r}{near}; expected a command, a setting, a kind or "
            "kind.name of a plugin"
        )
    setting = known[name]
    shown = (
        setting.type.__name__
        if isinstance(setting.type, type)
        else str(setting.type).replace("typing.", "")
    )
    flag = f"--{'plugins-' if setting.section == 'plugins' else ''}{name.replace('_', '-')}"
    return (
        f"{flag} ({setting.section})\n  {setting.help}\n  type {shown}, default {setting.default!r}"
    )
