"""`pegboard collect-env`: reports the machine and the installation for a bug report. It shows no
secrets from the environment and no paths of user files."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from pegboard.config.sources import plugin_config
from pegboard.env import usable_cpus
from pegboard.interfaces.command import CommandSetup
from pegboard.plugins.registry import Registry

VARIABLES = (
    "PEGBOARD_LOG_LEVEL",
    "PEGBOARD_PLUGINS",
    "PEGBOARD_STRICT",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
)
PROBED = ("platform", "kernel")
"""The kinds whose probes examine the machine."""


class CollectEnv:
    """The command `collect-env`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        description = "Report versions, machine and plugins, for a bug report."
        self._parser = setup.parser(prog="pegboard collect-env", description=description)
        self._parser.add_argument("--json", action="store_true", help="as JSON")
        quick = "do not import torch, which takes seconds, and probe no plugins"
        self._parser.add_argument("--no-torch", action="store_true", help=quick)

    def run(self, words: Sequence[str]) -> int:
        arguments = self._parser.parse(words)
        report = examine(Registry.discover(plugin_config()), not arguments.no_torch)
        print(json.dumps(report, indent=1) if arguments.json else "\n".join(_lines(report)))
        return 0


def examine(registry: Registry, with_torch: bool) -> dict[str, Any]:
    """Return the report: section → facts. with_torch: import torch and run the probes."""
    return {
        "system": {
            "os": platform.platform(),
            "libc": " ".join(platform.libc_ver()),
            "python": sys.version.split()[0],
        },
        "processor": _processor(),
        "packages": _versions(),
        "torch": _torch() if with_torch else {},
        "probes": _probes(registry) if with_torch else {},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "plugins": registry.describe(),
    }


def _processor() -> dict[str, Any]:
    memory = _read_pairs("/proc/meminfo")
    return {
        "machine": platform.machine(),
        "model": _read_pairs("/proc/cpuinfo").get("model name", platform.processor()),
        "usable cores": len(usable_cpus()),
        "cores": os.cpu_count(),
        "memory": memory.get("MemTotal", "unknown"),
        "available memory": memory.get("MemAvailable", "unknown"),
    }


def _read_pairs(path: str) -> dict[str, str]:
    """Read "name: value" lines from a file in /proc. The first value of each name counts. Returns
    {} if there is no such file."""
    try:
        lines = Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in reversed(lines)]
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _versions() -> dict[str, str]:
    """Return the versions of all installed Pegboard distributions and of the distributions that
    they require."""
    ours = {item.name: item for item in distributions() if re.match(r"pegboard($|[-_])", item.name)}
    wanted = {
        re.split(r"[^\w.-]", text, maxsplit=1)[0]
        for item in ours.values()
        for text in item.requires or ()
    }
    versions = {name: item.version for name, item in sorted(ours.items())}
    for name in sorted(wanted - set(versions)):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _torch() -> dict[str, Any]:
    """Return what torch reports. torch is imported here, because this command is about the whole
    installation."""
    try:
        torch = import_module("torch")
    except (ImportError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"threads": torch.get_num_threads(), "build": torch.__config__.show().replace("\n", " ")}


def _probes(registry: Registry) -> dict[str, str]:
    """Return the verdicts of the probes that examine the machine, one per distribution."""
    entries = {entry.distribution: entry for kind in PROBED for entry in registry.entries(kind)}
    return {
        f"{entry.kind} of {name}": str(registry.verdict(entry)) for name, entry in entries.items()
    }


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    for title, content in report.items():
        yield f"{title}:"
        if isinstance(content, Mapping):
            yield from (f"  {name}: {value}" for name, value in content.items())
            continue
        for row in content:
            state = (
                f"not usable: {row['reason']}"
                if row["reason"]
                else "enabled"
                if row["enabled"]
                else ""
            )
            yield (
                f"  {row['kind']}:{row['name']}: {row['distribution']} {row['version']} {state}"
            ).rstrip()
