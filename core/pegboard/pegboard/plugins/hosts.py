"""Ranks on other hosts need the plugins of the engine's host, in the same versions."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from pegboard.errors import PluginBroken
from pegboard.plugins.catalogue import Catalogue
from pegboard.plugins.discovery import UNINSTALLED
from pegboard.plugins.lockfile import CORE, installed_version


def plugin_versions(catalogue: Catalogue) -> dict[str, str]:
    """Return the version of pegboard, and of each distribution whose plugins the rules allow."""
    entries = [*catalogue.scan.entries, *catalogue.scan.hooks]
    allowed = [entry for entry in entries if not catalogue.blocked(entry)]
    versions = {each.distribution: each.version for each in allowed if each.version != UNINSTALLED}
    return {CORE: installed_version(CORE) or "none", **versions}


def check_same_plugins(versions: Mapping[str, str]) -> None:
    """Check that this host has the distributions of another one. versions: what `plugin_versions`
    returned there. More distributions may be installed here. Raises PluginBroken, which names each
    difference."""
    differences = [
        f"{name} (here {here}, there {there})"
        for name, there in sorted(versions.items())
        if (here := installed_version(name) or "none") != there
    ]
    if differences:
        raise PluginBroken(
            f"host {socket.gethostname()} has other plugins than the host of the engine: "
            f"{', '.join(differences)}; install the same versions on every host"
        )
