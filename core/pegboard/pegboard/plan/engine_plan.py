"""From settings to an engine plan: finds the model, describes it, and refuses what cannot work
before any expensive step.

Runs in A, without torch and without reading weights, in well under a second if the files are on
this machine. The plan is plain data. It includes the plugin lock, so the engine process makes the
same choices without scanning the installation again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from pegboard.config.data_parallel import check_expert_engines
from pegboard.config.limits import AUTO_LEN
from pegboard.config.schema import Settings, check_engine, structured_outputs_config
from pegboard.data.checkpoint_file import read_object
from pegboard.data.pooling_params import Pooling
from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import (
    ConfigError,
    ModelError,
    PluginError,
    PluginNotFound,
    RequestError,
)
from pegboard.installed import Entry, without_label
from pegboard.interfaces.draft import DraftSource
from pegboard.interfaces.kv_connector import KVConnectorSpec
from pegboard.interfaces.model_source import (
    FileFilter,
)
from pegboard.interfaces.spec import Need
from pegboard.interfaces.tokenizer import (
    Tokenizer,
    TokenizerNeed,
    TokenizerSetup,
    Vocabulary,
)
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TokenizerPayload,
)
from pegboard.log import get_logger
from pegboard.plan.checkpoint import (
    describe_files,
    download_bars,
    fetch,
    tokenizer_payload,
    with_overrides,
)
from pegboard.plan.conversion import with_decoder
from pegboard.plan.draft import choose_draft
from pegboard.plan.families import NONE, Family, choose_family, choose_parser, need_of
from pegboard.plan.media import (
    check_encoder_only,
    choose_processor,
    whole_of,
    with_encoder,
    with_processor,
)
from pegboard.plan.model_config import (
    eos_token_ids,
    max_model_len,
    overriding,
    vocab_size,
)
from pegboard.plan.parts import with_parts
from pegboard.plan.pooling import check_budget, choose_pooling
from pegboard.plan.quantization import check_quantization
from pegboard.plugins import lockfile
from pegboard.plugins.defaults import default_model
from pegboard.plugins.discovery import UNINSTALLED
from pegboard.plugins.names import not_found, to_install, whole_sets
from pegboard.plugins.registry import PluginLock, Registry

log = get_logger(__name__)

REQUIRED = (
    "model_source",
    "weight_loader",
    "tokenizer",
    "model",
    "quantization",
    "platform",
    "executor",
    "attention",
    "sampler",
    "scheduling_policy",
)
"""The kinds that every model needs."""

_DEFAULTS = {"max_new_tokens": "max_tokens"} | {
    name: name
    for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
}
"""Name in a generation_config → SamplingParams field."""


@dataclass(frozen=True)
class EnginePlan:
    """Everything that the engine process needs. Picklable.

    lock: the plugins as child processes see them. max_model_len, vocab_size: in tokens.
    eos_token_ids: ids that end an output according to the checkpoint. default_params: sampling
    defaults by SamplingParams field. model_names: names that clients may use. family: what the
    model's family recommends. tool_parser, reasoning_parser: qualified names of the chosen parsers.
    pooling: what the engine makes of prompts; None = it generates text. multimodal_processor: its
    qualified name; None = the engine takes only text. whole: see `Limits`. meeting: where the ranks
    of all engines meet, if they share out experts. draft: what the draft model is built from; None
    = there is none.
    """

    settings: Settings
    lock: PluginLock
    checkpoint: Checkpoint
    model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    default_params: Mapping[str, Any] = field(default_factory=dict)
    family: Family = Family()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    pooling: Pooling | None = None
    multimodal_processor: str | None = None
    whole: Literal["items", "prompt"] | None = None
    meeting: str = ""
    draft: DraftSource | None = None

    def of_length(self, max_model_len: int) -> EnginePlan:
        """Return the plan with the length that the engine serves; 0 = unchanged."""
        return replace(self, max_model_len=max_model_len or self.max_model_len)

    def of_engines(self, count: int, max_model_len: int = 0) -> EnginePlan:
        """Return the plan of so many engines, all on this host. max_model_len: see `of_length`."""
        settings = self.settings.with_engine(
            "scaling", data_parallel_size=count, data_parallel_size_local=None
        )
        return replace(self.of_length(max_model_len), settings=settings)


def resolve(settings: Settings) -> tuple[EnginePlan, Registry]:
    """Find, fetch and describe the model, and make every choice that needs no device.

    A download shows a bar on stderr, if that is a terminal. Each choice is logged as one DEBUG
    line. Raises ConfigError, ModelError or PluginError.
    """
    registry = Registry.discover(settings.plugins, settings.engine.logits_processors or ())
    if settings.plugins.lock is not None:
        lockfile.check(registry, settings.plugins.lock)
    settings = _amend(registry, settings)
    check_engine(settings.engine)
    check_expert_engines(settings.engine)
    _check_installed(registry)
    _check_names(registry, settings)
    registry.check_options()
    engine = settings.engine
    reference = engine.model or default_model()
    with download_bars() as report:
        files = fetch(registry, settings, reference, FileFilter(), report, engine.revision)
        checkpoint = describe_files(registry, files, engine.load_format, engine.seed)
        if engine.tokenizer is not None:
            payload = tokenizer_payload(registry, settings, engine.tokenizer, report)
            checkpoint = replace(checkpoint, tokenizer=payload)
    with overriding(engine.hf_overrides):
        checkpoint = with_overrides(checkpoint, engine.hf_overrides)
        checkpoint = with_parts(registry, settings, checkpoint)
        generation = _generation_config(settings, checkpoint)
        checkpoint, convert = with_decoder(registry, engine, checkpoint)
        flags = _choose_model(registry, settings, checkpoint)
        with download_bars() as report:
            settings, draft = choose_draft(registry, settings, checkpoint, report)
        settings, pooling = choose_pooling(registry, settings, flags, checkpoint, convert)
        settings = with_encoder(settings, flags, checkpoint)
        processor = choose_processor(registry, settings, flags, checkpoint)
        settings = with_processor(settings, registry, processor)
        check_encoder_only(settings)
        if engine.encoder_connector is not None and processor is None:
            raise ConfigError(
                f"encoder_connector {engine.encoder_connector!r} has no effect on a model that "
                "takes only text; leave it out"
            )
        family = choose_family(registry, need_of(checkpoint))
        tool_parser = choose_parser(registry, "tool_parser", engine.tool_call_parser, family)
        reasoning_parser = choose_parser(
            registry, "reasoning_parser", engine.reasoning_parser, family
        )
        num_tokens = vocab_size(checkpoint)
        longest = max_model_len(checkpoint.config, engine.max_model_len)
        if pooling is not None and engine.max_model_len in (None, *AUTO_LEN):
            longest = min(longest, pooling.max_length or longest)
        check_budget(settings.engine, longest)
        plan = EnginePlan(
            settings=settings,
            lock=registry.lock(),
            checkpoint=checkpoint,
            model_names=tuple(engine.served_model_name or [reference]),
            max_model_len=longest,
            vocab_size=num_tokens,
            eos_token_ids=eos_token_ids(
                num_tokens, (checkpoint.config, generation, engine.override_generation_config or {})
            ),
            default_params=_default_params(settings, generation),
            family=family,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            pooling=pooling,
            multimodal_processor=processor,
            whole="prompt"
            if processor is not None and pooling is not None and pooling.whole_prompts
            else whole_of(flags),
            draft=draft,
        )
    return plan, registry


def read_vocabulary(registry: Registry, plan: EnginePlan) -> Vocabulary:
    """Read the vocabulary of the plan's tokenizer. A `partial` of this function can be sent to
    another process."""
    return make_tokenizer(registry, plan).vocabulary()


def make_tokenizer(registry: Registry, plan: EnginePlan) -> Tokenizer:
    """Build the tokenizer for the plan's checkpoint: the one that was asked for, or one that can
    read the checkpoint's tokenizer files."""
    payload = plan.checkpoint.tokenizer.format
    mode = plan.settings.engine.tokenizer_mode
    need = TokenizerNeed(payload=payload)
    prefers = [name for name in [plan.family.recommends.get("tokenizer")] if name]
    if mode == "auto" and (
        absent := [name for name in prefers if name not in registry.names("tokenizer")]
    ):
        advice = not_found("tokenizer", absent[0], registry.names("tokenizer"), typed=False)
        log.warning(
            "the model family %s recommends the tokenizer %r, but %s",
            plan.family.name,
            absent[0],
            advice,
        )
    if mode == "auto":
        among = [
            entry
            for entry in registry.entries("tokenizer")
            if _reads_files(registry, entry, plan.checkpoint.tokenizer)
        ]
        decision = registry.choose("tokenizer", need, prefers=prefers, among=among, required=False)
    else:
        decision = registry.choose("tokenizer", need, explicit=mode, required=False)
    # A payload's format is the name of the tokenizer that reads it.
    if decision.winner is None and payload not in registry.names("tokenizer"):
        raise not_found("tokenizer", payload, registry.names("tokenizer"), typed=False)
    setup = TokenizerSetup(
        plan.checkpoint,
        _chat_template(plan.settings.engine.chat_template) or plan.family.chat_template,
    )
    tokenizer: Tokenizer = registry.build(decision.require(), setup)
    return tokenizer


def _reads_files(registry: Registry, entry: Entry, payload: TokenizerPayload) -> bool:
    """True if the files that the tokenizer needs exist."""
    try:
        # discovery checks the spec's class
        patterns = registry.spec(entry).file_patterns  # type: ignore[attr-defined]
    except PluginError:
        return True  # choosing it reports that it is broken
    if not patterns:
        return True
    directory = payload.directory
    return directory is not None and any(
        next(directory.glob(pattern), None) for pattern in patterns
    )


def _amend(registry: Registry, settings: Settings) -> Settings:
    """Let the enabled hook plugins change engine settings. Each change is logged and recorded with
    the plugin's name."""
    if not registry.enabled_hooks():
        return settings
    from pegboard.plugins.hooks import Hooks

    draft = msgspec.structs.asdict(settings.engine)
    for change in Hooks(registry).amend_config(draft):
        log.info(
            "setting %s: %r → %r, by %s", change.field, change.before, change.after, change.plugin
        )
        settings = settings.with_engine(f"plugin {change.plugin}", **{change.field: change.after})
    return settings


# --- early choices --------------------------------------------------------------------------------


def _check_installed(registry: Registry) -> None:
    """Check that every kind that a model needs is installed. One error names all kinds that are
    not."""
    installed = {entry.kind for entry in registry.scan.entries}
    missing = [to_install(kind) for kind in REQUIRED if kind not in installed]
    if missing:
        raise PluginNotFound("\n".join(missing) + (f"\n{whole_sets()}" if missing[1:] else ""))


def _check_names(registry: Registry, settings: Settings) -> None:
    """Check that every plugin that the user named is installed, or is a class that fits, before
    anything is fetched or loaded."""
    engine = settings.engine
    by_kind: dict[str, Sequence[str | None]] = {
        "platform": [engine.device],
        "executor": [engine.distributed_executor_backend],
        "scheduling_policy": [engine.scheduling_policy],
        "sampler": [engine.sampler],
        "pooler": [engine.pooler],
        "io_processor": [engine.io_processor_plugin],
        "attention": [engine.attention_backend],
        "draft": [engine.spec_method],
        "logits_processor": engine.logits_processors or (),
        "structured_output": structured_outputs_config(engine).names,
        "kv_connector": engine.kv_connectors or (),
        "encoder_connector": [engine.encoder_connector],
        "weight_transfer": [engine.weight_transfer],
        "tool_parser": [engine.tool_call_parser if engine.tool_call_parser != NONE else None],
        "reasoning_parser": [engine.reasoning_parser if engine.reasoning_parser != NONE else None],
    }
    for kind, names in by_kind.items():
        for name in names:
            if name not in (None, "auto"):
                entry = registry.find(kind, str(name))
                if entry.version == UNINSTALLED:
                    registry.spec(entry)
    _check_chain(registry, settings)


def _check_chain(registry: Registry, settings: Settings) -> None:
    """Check that the KV connectors may be beside each other, and that options under a label belong
    to one of them."""
    names = settings.engine.kv_connectors or []
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"kv_connectors {', '.join(names)}: {name} is there twice; give one of them a "
                f"label, as in {name}@second, and its options as kv_connector.{name}@second.OPTION"
            )
        entry = registry.find("kv_connector", name)
        registry.options(entry)
        spec = registry.spec(entry)
        if isinstance(spec, KVConnectorSpec) and spec.alone and len(names) > 1:
            raise ConfigError(
                f"kv_connectors {', '.join(names)}: {name} must be the only one, because "
                f"{spec.alone}; remove it or the others"
            )
    known = {f"kv_connector.{name}".replace("_", "-") for name in names}
    for address in settings.plugins.options:
        kind, _, name = address.partition(".")
        labelled = without_label(kind, name) != name
        if labelled and address.replace("_", "-") not in known:
            raise ConfigError(
                f"options for {address}: kv_connectors has no {name}, only "
                f"{', '.join(names) or 'nothing'}"
            )


def _choose_model(registry: Registry, settings: Settings, checkpoint: Checkpoint) -> frozenset[str]:
    """Check that plugins for the architecture and the quantization are installed, before anything
    is loaded. The error says what to install. Returns the flags of the model's spec."""
    if not checkpoint.architectures:
        raise ModelError(
            f"{checkpoint.path}: the checkpoint names no architecture; give one with "
            "--hf-overrides.architectures '[\"NAME\"]'"
        )
    if settings.engine.trust_remote_code and "auto_map" in checkpoint.config:
        raise ConfigError(
            "trust_remote_code: Pegboard never runs code from a checkpoint, and this one has some "
            "(auto_map in its config); without the setting, an installed model plugin runs the "
            "model"
        )
    model = registry.choose(
        "model",
        Need(batch_invariant=settings.engine.batch_invariant),
        keys=checkpoint.architectures,
    ).require()
    check_quantization(
        registry, settings.engine.quantization, (checkpoint.quantization or {}).get("quant_method")
    )
    return registry.spec(model).flags


# --- sampling defaults ----------------------------------------------------------------------------


def _generation_config(settings: Settings, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the generation config that the user chose: the checkpoint's, none, or one from a
    directory."""
    choice = settings.engine.generation_config
    if choice == "auto":
        return checkpoint.generation_config
    if choice == "vllm":
        return {}
    path = Path(choice).expanduser() / "generation_config.json"
    try:
        return read_object(path)
    except ModelError as error:
        raise ConfigError(
            f"generation_config={choice!r}: {error}; expected auto, vllm or a directory"
        ) from error


def _default_params(settings: Settings, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults by SamplingParams field. The user's overrides win."""
    overrides = settings.engine.override_generation_config or {}
    unknown = [name for name in overrides if name not in _DEFAULTS and name != "eos_token_id"]
    if unknown:
        raise ConfigError(
            f"override_generation_config: {unknown[0]!r} is not a sampling default; expected "
            f"{', '.join(_DEFAULTS)}"
        )
    merged = {**generation, **overrides}
    params = {
        field: merged[name] for name, field in _DEFAULTS.items() if merged.get(name) is not None
    }
    try:
        SamplingParams(**params)
    except RequestError as error:
        raise ModelError(
            f"the sampling defaults of the generation config are wrong: {error}; serve without "
            "them: --generation-config vllm"
        ) from error
    return params


def _chat_template(value: str | None) -> str | None:
    """Return the Jinja source, given a file name or the template itself. Raises ConfigError if a
    file cannot be read."""
    if value is None:
        return None
    is_source = any(mark in value for mark in "{}\n")
    if not is_source or (len(value) < 4096 and Path(value).is_file()):
        try:
            return Path(value).expanduser().read_text("utf-8")
        except OSError as error:
            raise ConfigError(
                f"chat_template: cannot read {value!r}: {error.strerror}; expected a file or a "
                "Jinja template"
            ) from error
    return value
