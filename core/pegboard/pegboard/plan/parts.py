"""Joins a checkpoint with others that its config names: Ultravox has only a projector, and the
language model is where its `text_model_id` says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pegboard.config.schema import Settings
from pegboard.errors import ModelError, blame, expect
from pegboard.interfaces.model import ModelPart, ModelSpec
from pegboard.interfaces.model_source import FileFilter
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry
from pegboard.log import get_logger
from pegboard.plan.checkpoint import describe_files, download_bars, fetch
from pegboard.plan.model_reference import HUB_NAME
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry

log = get_logger(__name__)


def with_parts(registry: Registry, settings: Settings, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the configs and the tensors of those that it names, which are
    fetched if they are not there. A part whose config it has is left out. Raises ModelError,
    PluginError."""
    if not checkpoint.architectures:
        return checkpoint
    entry = registry.choose("model", Need(), keys=checkpoint.architectures).require()
    spec = registry.spec(entry)
    assert isinstance(spec, ModelSpec), "discovery checks the spec's class"
    if spec.parts is None:
        return checkpoint
    list_parts = import_part(entry, spec.parts, "parts")
    with blame(entry.id, registry.modules):
        parts: Mapping[str, ModelPart] = expect(
            list_parts(checkpoint.config), Mapping, list_parts, "parts"
        )
    for key, part in parts.items():
        if checkpoint.config.get(key):
            continue
        check_place(settings, checkpoint, key, part)
        log.info("%s is that of %s", key, part.reference)
        checkpoint = _joined(checkpoint, key, part, _described(registry, settings, part.reference))
    return checkpoint


def check_place(settings: Settings, whole: Checkpoint, key: str, part: ModelPart) -> None:
    """Raise ModelError for a part at a place that only the user may name. A config from elsewhere
    may only name repositories."""
    engine = settings.engine
    is_typed = part.reference in (engine.hf_overrides or {}).values()
    is_local = engine.model is not None and Path(engine.model).expanduser().exists()
    if not (is_typed or is_local or HUB_NAME.fullmatch(part.reference)):
        raise ModelError(
            f"{whole.path}: its config names {part.reference!r} for {key}; expected org/name. To "
            "read it from there, name it with hf_overrides"
        )


def _described(registry: Registry, settings: Settings, reference: str) -> Checkpoint:
    engine = settings.engine
    with download_bars() as report:
        files = fetch(registry, settings, reference, FileFilter(), report, None)
    return describe_files(registry, files, engine.load_format, engine.seed)


def _joined(whole: Checkpoint, key: str, part: ModelPart, other: Checkpoint) -> Checkpoint:
    name = f"{whole.path}: {part.reference!r}, which its config names for {key},"
    if other.format != whole.format:
        raise ModelError(f"{name} has the format {other.format}; expected {whole.format}")
    if other.quantization:
        method = other.quantization.get("quant_method")
        raise ModelError(f"{name} is quantized ({method}); name one with plain weights")
    if other.rope_style != whole.rope_style:
        raise ModelError(
            f"{name} has rotary channels in {other.rope_style}; expected {whole.rope_style}"
        )
    folder = other.path if other.path.is_dir() else other.path.parent
    tensors: dict[str, TensorEntry] = {
        part.prefix + entry.name: replace(
            entry,
            name=part.prefix + entry.name,
            file=str(folder / entry.file),
            key=entry.key or entry.name,
        )
        for entry in other.tensors.values()
    }
    digests = f"{whole.digest} {part.prefix}{other.digest}"
    return replace(
        whole,
        config={**whole.config, key: other.config},
        tensors={**tensors, **whole.tensors},
        digest=f"sha256:{hashlib.sha256(digests.encode()).hexdigest()}",
    )
