"""What the draft model of speculative decoding is built from."""

from __future__ import annotations

from pegboard.config.limits import NO_LIMIT
from pegboard.config.schema import EngineConfig, Settings
from pegboard.errors import ConfigError, ModelError, blame, expect
from pegboard.interfaces.draft import DraftNeed, DraftSource, DraftSpec
from pegboard.interfaces.model_source import FileFilter, Progress
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.plan.checkpoint import describe_files, fetch
from pegboard.plan.model_config import own_limit
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry

ALONE = (
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)
"""Settings that must be 1 with a draft model."""
OF_A_MODEL = ("spec_model", "spec_tensor_parallel_size", "spec_enforce_eager")
"""Settings that have no effect without a draft model."""


def draft_spec(registry: Registry, engine: EngineConfig) -> DraftSpec | None:
    """Return the spec of the draft plugin, if one is configured."""
    if engine.spec_method is None:
        return None
    spec = registry.spec(registry.find("draft", engine.spec_method))
    assert isinstance(spec, DraftSpec), "discovery checks the spec's class"
    return spec


def choose_draft(
    registry: Registry, settings: Settings, target: Checkpoint, progress: Progress
) -> tuple[Settings, DraftSource | None]:
    """Return the settings with the method and the number of drafts, and what the draft model is
    built from. Its checkpoint is fetched if it is not there. None = the method has no model.
    Raises ConfigError, ModelError, PluginError."""
    engine = settings.engine
    checkpoint = None
    if engine.spec_model is not None:
        files = fetch(
            registry, settings, engine.spec_model, FileFilter(), progress, engine.spec_revision
        )
        checkpoint = describe_files(registry, files, engine.load_format, engine.seed)
        if engine.spec_method is None:
            settings = settings.with_engine(
                "the draft model", spec_method=_method_of(registry, checkpoint)
            )
    spec = draft_spec(registry, settings.engine)
    if spec is None:
        return settings, None
    source = _source(registry, settings.engine, spec, target, checkpoint)
    if not settings.engine.spec_tokens:
        if source is None or source.num_drafts is None:
            raise ConfigError(
                f"the method {settings.engine.spec_method!r} can propose any number of tokens; set "
                "spec_tokens (num_speculative_tokens), at least 1"
            )
        settings = settings.with_engine("the draft model", spec_tokens=source.num_drafts)
    return settings, source


def draft_len(engine: EngineConfig, source: DraftSource | None) -> int:
    """Return the length after which there are no drafts: the user's, or the limit of the draft
    model if that is lower."""
    limit = own_limit(source.checkpoint.config) if source is not None else None
    return min(engine.spec_max_model_len or NO_LIMIT, limit or NO_LIMIT)


def _method_of(registry: Registry, draft: Checkpoint) -> str:
    """Return the method that the named checkpoint was made for."""
    if not draft.architectures:
        raise ConfigError(
            f"{draft.path}: the config names no architecture, so that the method is not known; set "
            "spec_method, or method in speculative_config"
        )
    need = DraftNeed(architecture=draft.architectures[0])
    return registry.choose("draft", need).require().name


def _source(
    registry: Registry,
    engine: EngineConfig,
    spec: DraftSpec,
    target: Checkpoint,
    draft: Checkpoint | None,
) -> DraftSource | None:
    """Return what the draft model is built from. draft: the checkpoint that the user has named."""
    ranks = engine.spec_tensor_parallel_size
    if spec.source is None:
        for name in OF_A_MODEL:
            if getattr(engine, name):
                raise ConfigError(
                    f"{name} has no effect on the method {engine.spec_method!r}, which has no "
                    "model; leave it out"
                )
        return None
    for name in ALONE:
        if getattr(engine, name) > 1:
            raise ConfigError(
                f"{name} is not possible with the method {engine.spec_method!r}, whose model each "
                "rank computes; set it to 1"
            )
    if ranks not in (None, 1, engine.tensor_parallel_size):
        raise ConfigError(
            f"spec_tensor_parallel_size={ranks}: expected 1 or the value of tensor_parallel_size, "
            f"{engine.tensor_parallel_size}"
        )
    entry = registry.find("draft", str(engine.spec_method))
    make = import_part(entry, spec.source, "source")
    with blame(entry.id, registry.modules):
        source: DraftSource = expect(make(target, draft), DraftSource, make, "source")
    model = registry.choose("model", Need(), keys=source.checkpoint.architectures).require()
    if "encoder" in registry.spec(model).flags:
        raise ModelError(f"{source.checkpoint.path}: {model.name} proposes no tokens")
    return source
