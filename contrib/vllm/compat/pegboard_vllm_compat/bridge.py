"""Writes the file that `--plugin FILE` and `LLM(plugin_files=[…])` take, for classes that were
written for vLLM. Every process of an engine runs this file, and it names the adapters of this
package."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ADAPTERS = {
    "logits_processor": "pegboard_vllm_compat.logits_adapter:VllmProcessor",
    "tool_parser": "pegboard_vllm_compat.parser_adapter:VllmToolParser",
    "reasoning_parser": "pegboard_vllm_compat.parser_adapter:VllmReasoningParser",
    "lora_resolver": "pegboard_vllm_compat.resolver_adapter:VllmResolver",
    "metrics": "pegboard_vllm_compat.stat_adapter:VllmStatLogger",
    "io_processor": "pegboard_vllm_compat.io_adapter:VllmIOProcessor",
}
"""Kind → the class of this package that adapts vLLM's."""


@dataclass(frozen=True)
class Adapted:
    """A class of vLLM's form. kind, name: of the plugin that it becomes. target: "module:Class" or
    "FILE.py:Class"; of a parser or LoRA resolver, "FILE.py" or "module:function", which registers
    it; of a stat logger, perhaps what `stat_adapter.give` returns; of an IO processor, its
    name. special_tokens: a parser that
    reads them. base_model: the model that is served."""

    kind: str
    name: str
    target: str
    special_tokens: bool = False
    base_model: str = ""


def source(items: Sequence[Adapted], *, shadow: bool = False) -> str:
    """Return the text of the file."""
    parts = ['"""Made by pegboard-vllm-compat."""\n']
    for place, item in enumerate(items):
        module, _, adapter = ADAPTERS[item.kind].partition(":")
        fields = [
            f"plugin = {f'{item.kind}:{item.name}'!r}",
            f"target = {item.target!r}",
            f"name = {item.name!r}",
            f"shadow = {shadow}",
        ]
        if item.base_model:
            fields.append(f"base_model = {item.base_model!r}")
        if item.special_tokens:
            fields.append("special_tokens = True")
        before = f"from {module} import {adapter}\n"
        if item.kind == "logits_processor":
            before += f"from {module} import validator\n\n"
            before += f"validate_{place} = validator({item.target!r}, shadow={shadow})\n"
            fields.append(f'spec_fields = {{"validate": f"{{__name__}}:validate_{place}"}}')
        body = "\n    ".join(fields)
        parts.append(f"{before}\n\nclass Plugin{place}({adapter}):\n    {body}\n")
    return "\n".join(parts)


def write(items: Sequence[Adapted], *, shadow: bool = False) -> Path:
    """Write the file into a folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="pegboard-vllm-compat-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = Path(folder) / "vllm_plugins.py"
    file.write_text(source(items, shadow=shadow), "utf-8")
    return file
