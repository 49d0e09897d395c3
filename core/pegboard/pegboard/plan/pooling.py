"""How an engine that pools makes vectors, as the model's config and the files of
sentence-transformers next to it declare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pegboard.config.schema import EngineConfig, Settings
from pegboard.config.setting import build
from pegboard.data.checkpoint_file import read_object, read_text
from pegboard.data.pooling_params import PoolerConfig, Pooling, PoolingParams
from pegboard.errors import ConfigError, ModelError, RequestError
from pegboard.interfaces.weight_loader import Checkpoint

_STEPS = ("Transformer", "Pooling", "Normalize")
_MODES = "pooling_mode_"
_TYPES = {"lasttoken": "LAST", "cls_token": "CLS", "mean_tokens": "MEAN"}
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}


def choose_pooling(
    settings: Settings, flags: frozenset[str], checkpoint: Checkpoint
) -> tuple[Settings, Pooling | None]:
    """Return the settings that the model needs, and what the engine makes of prompts, or None if it
    generates text. flags: of the model's spec.

    Encoders and classifiers always pool. A vector of more than the last token is made of a whole
    prompt, so prompts are neither computed in chunks nor taken from the prefix cache. Raises
    ConfigError for settings that do not fit, ModelError for files that ask for something else.
    """
    engine = settings.engine
    always_pools = bool(flags & {"encoder", "classifier"})
    if always_pools and engine.runner == "generate":
        raise ConfigError(
            f"runner 'generate': {checkpoint.architectures[0]} generates no text; use runner "
            "'auto' or 'pooling'"
        )
    if not always_pools and engine.runner != "pooling":
        if engine.pooler_config is not None:
            raise ConfigError(
                "pooler_config has no effect on a model that generates text; add runner 'pooling'"
            )
        return settings, None
    if engine.spec_method is not None:
        raise ConfigError(
            "runner 'pooling' samples no tokens, so drafts have no effect; remove spec_method"
        )
    pooling = _declared(flags, checkpoint)
    chosen: PoolerConfig = build(PoolerConfig, engine.pooler_config or {}, "pooler_config")
    pooling = _replaced(
        pooling, pooling_type=chosen.pooling_type, use_activation=chosen.use_activation
    )
    changes: dict[str, Any] = {"runner": "pooling"}
    if "encoder" in flags or pooling.pooling_type != "LAST":
        _check_whole(settings)
        changes |= {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    return settings.with_engine(f"the model {checkpoint.architectures[0]}", **changes), pooling


def _replaced(pooling: Pooling, **values: Any) -> Pooling:
    return msgspec.structs.replace(
        pooling, **{name: value for name, value in values.items() if value is not None}
    )


def _check_whole(settings: Settings) -> None:
    """Refuse what the user has set and prompts that are computed in one step cannot have."""
    for name in ("enable_chunked_prefill", "enable_prefix_caching"):
        if name in settings.sources and getattr(settings.engine, name):
            raise ConfigError(
                f"{name} is not possible with this model: a prompt must be computed in one step; "
                "leave it out"
            )
    if settings.engine.kv_connectors:
        raise ConfigError(
            "this model's prompts are always computed, so KV connectors have no effect; remove "
            "kv_connectors"
        )


def check_budget(engine: EngineConfig, max_model_len: int) -> None:
    """Raise ConfigError if the longest prompt does not fit in a step and must."""
    budget = engine.max_num_batched_tokens
    if (
        engine.runner == "pooling"
        and not engine.enable_chunked_prefill
        and budget is not None
        and budget < max_model_len
    ):
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={max_model_len}, and a "
            "prompt must be computed in one step; raise the first or lower the second"
        )


def _declared(flags: frozenset[str], checkpoint: Checkpoint) -> Pooling:
    """Return what the checkpoint's files say."""
    default = Pooling(pooling_type="CLS" if "encoder" in flags else "LAST")
    if "classifier" in flags:
        of_config = str(checkpoint.config.get("classifier_pooling", "")).upper() or None
        if of_config not in (None, "CLS", "MEAN"):
            raise ModelError(
                f"{checkpoint.path}: classifier_pooling is {of_config!r:.60}; expected cls or mean"
            )
        return _replaced(
            default,
            task="classify",
            activation=_class_activation(checkpoint.config),
            pooling_type=of_config,
        )
    path = checkpoint.path / "modules.json"
    if not path.is_file():
        return default
    modules = _listed(path)
    names = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unknown := [name for name in names if name not in _STEPS]:
        raise ModelError(
            f"{path}: the step {unknown[0]!r:.80} is not supported; expected {', '.join(_STEPS)}"
        )
    folders = [
        str(module.get("path"))
        for module, name in zip(modules, names, strict=True)
        if name == "Pooling"
    ]
    for folder in folders:
        default = _replaced(default, pooling_type=_pooling_type(checkpoint, folder))
    return _replaced(default, use_activation="Normalize" in names)


def _class_activation(config: Mapping[str, Any]) -> str:
    """Return what makes scores of the classes' values: what sentence-transformers has stored, or
    what the problem's type asks for."""
    stored = config.get("sentence_transformers")
    name = stored.get("activation_fn") if isinstance(stored, Mapping) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is not None:
        last = str(name).rpartition(".")[2]
        if last not in _ACTIVATIONS:
            raise ModelError(
                f"the activation {name!r:.80} of the checkpoint's config is not known; expected "
                f"{', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[last]
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    return (
        "sigmoid"
        if problem == "multi_label_classification" or len(labels(config)) == 1
        else "softmax"
    )


def task_of(
    pooling: Pooling | None, config: Mapping[str, Any]
) -> tuple[Literal["generate", "embed", "classify"], tuple[str, ...]]:
    """Return what an engine makes of prompts, and the names of the model's classes."""
    if pooling is None:
        return "generate", ()
    return pooling.task, labels(config) if pooling.task == "classify" else ()


def labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes. Without names, there are two, as in transformers."""
    named = config.get("id2label")
    if isinstance(named, Mapping) and named:
        return tuple(
            str(named.get(str(place), named.get(place, place))) for place in range(len(named))
        )
    number = config.get("num_labels")
    return tuple(
        f"LABEL_{place}" for place in range(number if isinstance(number, int) and number > 0 else 2)
    )


def _listed(path: Any) -> list[dict[str, Any]]:
    try:
        modules = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} must contain a list of objects, one per step")
    return modules


def _pooling_type(checkpoint: Checkpoint, folder: str) -> str:
    root = checkpoint.path.resolve()
    path = (root / folder / "config.json").resolve()
    if not path.is_relative_to(root):
        raise ModelError(
            f"{checkpoint.path / 'modules.json'}: the path {folder!r:.80} leaves the model's folder"
        )
    modes = [
        name.removeprefix(_MODES)
        for name, is_on in read_object(path).items()
        if name.startswith(_MODES) and is_on
    ]
    if len(modes) != 1 or modes[0] not in _TYPES:
        raise ModelError(
            f"{path}: the model pools by {', '.join(modes) or 'nothing'}; supported: "
            f"{', '.join(_TYPES)}"
        )
    return _TYPES[modes[0]]


def sentence_length(checkpoint: Checkpoint) -> int | None:
    """Return the length in tokens that the model was trained for: that of sentence-transformers, or
    else of its tokenizer."""
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        path = checkpoint.path / name
        length = read_object(path).get(key) if path.is_file() else None
        if isinstance(length, int) and 0 < length < 2**31:
            return length
    return None


def merged_pooling(params: PoolingParams, pooling: Pooling, config: Any) -> PoolingParams:
    """Return `params` with the model's default. Raises RequestError for another task than the
    model's, and for dimensions that the model does not declare: a config has `is_matryoshka`, or
    lists `matryoshka_dimensions`. They can be set with hf_overrides."""
    if params.task not in (None, pooling.task):
        does = (
            "classifies texts and has no vectors"
            if pooling.task == "classify"
            else "makes vectors and has no classes"
        )
        raise RequestError(f"this model {does}; it cannot {params.task}", parameter="task")
    if (wanted := params.dimensions) is not None:
        listed = config.get("matryoshka_dimensions")
        size = config.get("hidden_size")
        if pooling.task != "embed" or (not listed and not config.get("is_matryoshka")):
            reason = (
                "the model does not declare is_matryoshka or matryoshka_dimensions, so its "
                "vectors cannot be shortened"
            )
            raise RequestError(
                f"dimensions={wanted}: {reason}; leave dimensions out", parameter="dimensions"
            )
        if wanted not in listed if listed else size is None or wanted > size:
            expected = ", ".join(map(str, listed)) if listed else f"at most {size}"
            raise RequestError(
                f"dimensions={wanted} is not possible with this model; expected {expected}",
                parameter="dimensions",
            )
    use_activation = (
        pooling.use_activation if params.use_activation is None else params.use_activation
    )
    return PoolingParams(dimensions=wanted, use_activation=use_activation)
