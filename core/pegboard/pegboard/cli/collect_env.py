"""`pegboard collect-env`: what a bug report should say about the machine and the installation. No values of environment variables
that could be secret, no paths of the user's files."""

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

from pegboard.cli.flags import FlagParser, config_layers

CPU_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni",
             "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve")  # fmt: skip

VARIABLES = ("PEGBOARD_LOG_LEVEL", "PEGBOARD_PLUGINS", "PEGBOARD_STRICT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS",
             "CUDA_VISIBLE_DEVICES")  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print the report, as text or JSON."""
    parser = FlagParser(prog="pegboard collect-env", description="Report versions, machine and plugins, for a bug report.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--no-torch", action="store_true", help="do not import torch (it takes seconds)")
    arguments = parser.parse(argv)
    report = collect(with_torch=not arguments.no_torch)
    print(json.dumps(report, indent=1) if arguments.json else "\n".join(_lines(report)))
    return 0


def collect(*, with_torch: bool) -> dict[str, Any]:
    """The report by section."""
    return {
        "system": _system(),
        "processor": _processor(),
        "packages": _versions(),
        "torch": _torch() if with_torch else {},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "plugins": _plugins(),
    }


def _system() -> dict[str, Any]:
    return {
        "os": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
    }


def _processor() -> dict[str, Any]:
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    info = _read_pairs("/proc/cpuinfo")
    flags = set((info.get("flags") or info.get("Features") or "").split())
    memory = _read_pairs("/proc/meminfo")
    return {
        "machine": platform.machine(),
        "model": info.get("model name", platform.processor()),
        "usable cores": len(cpus),
        "cores": os.cpu_count(),
        "flags": [name for name in CPU_FLAGS if name in flags],
        "memory": memory.get("MemTotal", "unknown"),
        "available memory": memory.get("MemAvailable", "unknown"),
    }


def _read_pairs(path: str) -> dict[str, str]:
    """The first "name: value" of every name in a file of /proc; nothing where there is no such file."""
    found: dict[str, str] = {}
    try:
        text = Path(path).read_text("utf-8", "replace")
    except OSError:
        return found
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _versions() -> dict[str, str]:
    """Every installed distribution of Pegboard, and everything one of them asks for."""
    ours = {item.name: item for item in distributions() if re.match(r"pegboard($|[-_])", item.name)}
    wanted = {re.split(r"[^\w.-]", text, maxsplit=1)[0] for item in ours.values() for text in item.requires or ()}
    found = {name: item.version for name, item in sorted(ours.items())}
    for name in sorted(wanted - set(found)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _torch() -> dict[str, Any]:
    """What only torch knows; imported here, because this command is about the whole installation."""
    try:
        torch = import_module("torch")
    except (ImportError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
    }


def _plugins() -> list[dict[str, Any]]:
    """Every installed plugin with what is decided before a model is known: allowed or not, enabled or not."""
    from pegboard.config.sources import settings_from
    from pegboard.plugins.policy import PluginPolicy
    from pegboard.plugins.registry import Registry

    registry = Registry.discover(PluginPolicy.from_config(settings_from(config_layers(None)).plugins))
    return registry.describe()


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    for title, content in report.items():
        yield f"{title}:"
        rows = content.items() if isinstance(content, Mapping) else ((_row_name(row), _row_text(row)) for row in content)
        for name, value in rows:
            yield f"  {name}: {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _row_name(row: Mapping[str, Any]) -> str:
    return f"{row['kind']}:{row['name']}"


def _row_text(row: Mapping[str, Any]) -> str:
    state = f"not usable: {row['reason']}" if row["reason"] else "enabled" if row["enabled"] else ""
    return f"{row['distribution']} {row['version']} {state}".rstrip()
