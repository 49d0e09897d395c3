"""Describes the checkpoint with which a running engine replaces its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.errors import ModelError, brief
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.plan.checkpoint import describe_files, with_overrides
from pegboard.plan.engine_plan import EnginePlan
from pegboard.plan.parts import with_parts
from pegboard.plugins.registry import Registry

FREE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Values of a config that do not change what the loaded model computes. The architectures are
compared in their own field."""

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Stored types that a weight may change between, because they are converted to the compute type."""


def describe_update(registry: Registry, plan: EnginePlan, path: str) -> Checkpoint:
    """Return the checkpoint in the folder or file `path`. Its files may be in another format than
    those of the loaded one. Raises ModelError if it is not a checkpoint of the same model, with
    weights stored in the same way."""
    engine = plan.settings.engine
    loaded = plan.checkpoint
    root = Path(path).expanduser()
    if not root.exists():
        raise ModelError(f"the checkpoint {root} does not exist")
    checkpoint = with_overrides(
        describe_files(registry, LocalFiles(root), "auto", engine.seed), engine.hf_overrides
    )
    checkpoint = with_parts(registry, plan.settings, checkpoint)
    for name in ("architectures", "quantization", "rope_style"):
        _compare(root, name, getattr(checkpoint, name), getattr(loaded, name))
    new = _compared(checkpoint.config)
    old = _compared(loaded.config)
    for name in sorted(new.keys() | old.keys()):
        _compare(root, name, new.get(name), old.get(name))
    for name in sorted(checkpoint.tensors.keys() & loaded.tensors.keys()):
        stored = checkpoint.tensors[name].stored
        before = loaded.tensors[name].stored
        if not {stored, before} <= FLOATS:
            _compare(root, f"the type of {name}", stored, before)
    return checkpoint


def _compared(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _compared(item)
            for name, item in value.items()
            if name not in FREE and item is not None
        }
    return value


def _compare(root: Path, name: str, new: object, old: object) -> None:
    if new != old:
        raise ModelError(
            f"{root} is another model: {name} is {brief(new)}, the engine has {brief(old)}; start "
            "a new engine for it"
        )
