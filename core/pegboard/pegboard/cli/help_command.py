"""`pegboard help [what]`: a command, a setting, or `kind.name` for the options of a plugin."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.cli.flags import config_layers
from pegboard.cli.main import commands, overview
from pegboard.cli.main import main as run_command
from pegboard.cli.usage import UsageError
from pegboard.config.schema import SECTIONS, Setting, settings_of
from pegboard.plugins.names import did_you_mean


def main(argv: Sequence[str]) -> int:
    """Print the explanation. Raises UsageError for a word that means nothing."""
    if len(argv) > 1:
        raise UsageError(f"pegboard help explains one thing at a time, got {len(argv)}")
    what = argv[0] if argv else ""
    if what in ("", "-h", "--help"):
        print(overview())
    elif what in commands() and what != "help":
        return run_command([what, "--help"])
    elif "." in what:
        print(_options(what))
    else:
        print(_setting(what))
    return 0


def _options(address: str) -> str:
    from pegboard.config.sources import settings_from
    from pegboard.plugins.options import schema_text
    from pegboard.plugins.policy import PluginPolicy, option_key
    from pegboard.plugins.registry import Registry

    registry = Registry.discover(PluginPolicy.from_config(settings_from(config_layers(None)).plugins))
    kind, name = option_key(address)
    return schema_text(registry.find(kind.replace("-", "_"), name))


def _setting(word: str) -> str:
    name = word.lstrip("-").replace("-", "_")
    known = {setting.name: setting for section in SECTIONS for setting in settings_of(section)}
    if name not in known:
        near = did_you_mean(name, [*known, *commands()])
        raise UsageError(f"nothing is called {word!r}{near}; expected a command, a setting or kind.name of a plugin")
    return _explain(known[name])


def _explain(setting: Setting) -> str:
    shown = str(setting.type).replace("typing.", "") if not isinstance(setting.type, type) else setting.type.__name__
    prefix = "plugins-" if setting.section == "plugins" else ""
    flag = f"--{prefix}{setting.name.replace('_', '-')}"
    return f"{flag} ({setting.section})\n  {setting.help}\n  type {shown}, default {setting.default!r}"
