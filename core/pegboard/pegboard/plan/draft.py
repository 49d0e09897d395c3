"""What the draft model of speculative decoding is built from."""

from __future__ import annotations

from pegboard.config.schema import EngineConfig, Settings
from pegboard.errors import ConfigError, ModelError, blame, expect
from pegboard.interfaces.draft import DraftSource, DraftSpec
from pegboard.interfaces.model_source import FileFilter, Progress
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.plan.checkpoint import describe_files, fetch
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry

ALONE = (
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)
"""Settings that must be 1 with a draft model."""


def draft_spec(registry: Registry, engine: EngineConfig) -> DraftSpec | None:
    """Return the spec of the draft plugin, if one is configured."""
    if engine.spec_method is None:
        return None
    spec = registry.spec(registry.find("draft", engine.spec_method))
    assert isinstance(spec, DraftSpec), "discovery checks the spec's class"
    return spec


def draft_source(
    registry: Registry, settings: Settings, target: Checkpoint, progress: Progress
) -> DraftSource | None:
    """Return what the draft model is built from, whose checkpoint is fetched if it is not there.
    None = the method has no model. Raises ConfigError, ModelError, PluginError."""
    engine = settings.engine
    spec = draft_spec(registry, engine)
    if spec is None or spec.source is None:
        if engine.spec_model is not None:
            raise ConfigError(
                f"spec_model has no effect on the method {engine.spec_method!r}, which has no "
                "model; leave it out"
            )
        return None
    for name in ALONE:
        if getattr(engine, name) > 1:
            raise ConfigError(
                f"{name} is not possible with the method {engine.spec_method!r}, whose model each "
                "rank computes; set it to 1"
            )
    entry = registry.find("draft", str(engine.spec_method))
    checkpoint = None
    if engine.spec_model is not None:
        files = fetch(
            registry, settings, engine.spec_model, FileFilter(), progress, engine.spec_revision
        )
        checkpoint = describe_files(registry, files, engine.load_format, engine.seed)
    make = import_part(entry, spec.source, "source")
    with blame(entry.id, registry.modules):
        source: DraftSource = expect(make(target, checkpoint), DraftSource, make, "source")
    model = registry.choose("model", Need(), keys=source.checkpoint.architectures).require()
    if "encoder" in registry.spec(model).flags:
        raise ModelError(f"{source.checkpoint.path}: {model.name} proposes no tokens")
    return source
