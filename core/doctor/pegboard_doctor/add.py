"""`pegboard plugins add NAME…`: which distributions provide the names, and the pip command that
installs them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from pegboard.errors import UsageError, did_you_mean
from pegboard.installed import normalized
from pegboard.interfaces import KINDS
from pegboard.interfaces.command import CommandSetup
from pegboard.plugins.defaults import catalogue, plugin_sets

CORE = "pegboard"
OTHERS = "; it lists Pegboard's own plugins: install others with pip, by their distribution"


class Add:
    """The command `plugins add`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard plugins add",
            description="Print the pip command that installs plugins, or run it with --yes. Only "
            "the catalogue of this Pegboard is asked, not the network.",
        )
        self._parser.add_argument(
            "names",
            nargs="+",
            metavar="NAME",
            help=f"KIND:NAME, NAME, a distribution, or a set: {', '.join(plugin_sets())}",
        )
        self._parser.add_argument("--yes", action="store_true", help="run the command")
        self._parser.add_argument(
            "--index-url", metavar="URL", help="where pip looks instead of PyPI"
        )

    def run(self, words: Sequence[str]) -> int:
        """Return 0, or pip's exit status."""
        arguments = self._parser.parse(words)
        wanted = dict.fromkeys(requirement(name) for name in arguments.names)
        missing = [name for name in wanted if not _is_installed(name)]
        for name in wanted:
            if name not in missing:
                print(f"{name} {version(name)} is installed")
        if not missing:
            return 0
        more = ["--index-url", arguments.index_url] if arguments.index_url else []
        command = ["pip", "install", *more, *missing]
        if not arguments.yes:
            print(shlex.join(command))
            return 0
        if find_spec("pip") is None:
            raise UsageError(f"this environment has no pip; what to run: {shlex.join(command)}")
        return subprocess.run([sys.executable, "-m", *command], check=False).returncode


def requirement(name: str) -> str:
    """Return what pip installs for a name that a person typed: a distribution, or
    "pegboard[set]". Raises UsageError if nothing, or more than one thing, is called so."""
    if name in plugin_sets():
        return f"{CORE}[{name}]"
    known = catalogue()
    distributions = {each for names in known.values() for each in names.values()}
    if normalized(name) in distributions:
        return normalized(name)
    kind, colon, plugin = name.rpartition(":")
    if colon and kind not in KINDS:
        raise UsageError(f"no kind of plugin is called {kind!r}{did_you_mean(kind, KINDS)}")
    providers = {
        each: names[plugin]
        for each, names in known.items()
        if plugin in names and kind in ("", each)
    }
    if not providers:
        names = {each: None for group in known for each in known[group] if kind in ("", group)}
        near = [f"{kind}:{each}" if colon else each for each in names]
        raise UsageError(
            f"the catalogue has no plugin {name!r}"
            f"{did_you_mean(name, [*near, *distributions]) or OTHERS}"
        )
    if len(set(providers.values())) > 1:
        options = ", ".join(f"{each}:{plugin} ({dist})" for each, dist in providers.items())
        raise UsageError(f"several plugins are called {plugin!r}; name one of {options}")
    return next(iter(providers.values()))


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
