"""Whether an engine pools, what a pooler plugin then makes of prompts, and the settings that this
needs."""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.config.schema import EngineConfig, Settings
from pegboard.data.pooling_params import TOKEN_TASKS, Pooling, PoolingParams
from pegboard.errors import ConfigError, RequestError, blame, expect
from pegboard.interfaces.pooler import Convert, PoolerFacts, PoolerSpec
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.plan.conversion import sees_all
from pegboard.plugins.defaults import default_name
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry


def choose_pooling(
    registry: Registry,
    settings: Settings,
    flags: frozenset[str],
    checkpoint: Checkpoint,
    convert: Convert | None,
) -> tuple[Settings, Pooling | None]:
    """Return the settings that the model needs, and what the engine makes of prompts, or None if it
    generates text. flags: of the model's spec. convert: see `conversion.with_decoder`.

    Encoders and classifiers always pool. Raises ConfigError for settings that do not fit, and as
    the plugin does.
    """
    engine = settings.engine
    always_pools = bool(flags & {"encoder", "classifier"})
    if always_pools:
        if engine.convert in ("embed", "classify"):
            raise ConfigError(
                f"convert {engine.convert!r}: {checkpoint.architectures[0]} makes vectors or "
                "classes itself; leave convert out"
            )
        convert = None
    if engine.runner == "generate" and (always_pools or convert is not None):
        raise ConfigError(
            f"runner 'generate': {checkpoint.architectures[0]} generates no text; use runner "
            "'auto' or 'pooling'"
            if engine.convert in ("auto", "none")
            else f"convert {engine.convert!r} has no effect on runner 'generate'; leave one out"
        )
    if not always_pools and convert is None:
        for setting in ("pooler_config", "io_processor_plugin"):
            if getattr(engine, setting) is not None:
                raise ConfigError(
                    f"{setting} has no effect on a model that generates text; add runner 'pooling'"
                )
        return settings, None
    if engine.spec_method is not None:
        raise ConfigError(
            "runner 'pooling' samples no tokens, so drafts have no effect; remove spec_method"
        )
    name = engine.pooler or default_name("pooler")
    entry = registry.choose("pooler", Need(), explicit=name).require()
    spec = registry.spec(entry)
    assert isinstance(spec, PoolerSpec)
    both_ways = convert is not None and sees_all(checkpoint)
    plan = import_part(entry, spec.plan, "plan")
    with blame(entry.id):
        planned = plan(
            PoolerFacts(flags, checkpoint, engine.pooler_config or {}, convert, both_ways)
        )
        planned = expect(planned, Pooling, plan, spec.plan)
    pooling = msgspec.structs.replace(
        planned,
        pooler=entry.qualified,
        head=() if convert == "embed" else planned.head,
        sees_all=both_ways or planned.sees_all,
        whole_prompts=both_ways or planned.whole_prompts,
    )
    changes: dict[str, Any] = {"runner": "pooling"}
    if pooling.whole_prompts:
        _check_whole(settings)
        changes |= {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    return settings.with_engine(f"the model {checkpoint.architectures[0]}", **changes), pooling


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


def merged_pooling(params: PoolingParams, pooling: Pooling) -> PoolingParams:
    """Return `params` with the model's defaults. Raises RequestError for a task that the model does
    not do, and for what it does not allow."""
    task = params.task or pooling.task
    if task not in (pooling.task, *pooling.tasks):
        does = (
            "classifies texts and has no vectors"
            if pooling.makes == "classify"
            else "makes vectors and has no classes"
        )
        if task.removeprefix("token_") == pooling.makes:
            does = (
                "makes one result for a prompt, and none for its tokens"
                if task in TOKEN_TASKS
                else f"makes a result for each token (task {pooling.task}), and none for the prompt"
            )
        raise RequestError(f"this model {does}; it cannot {task}", parameter="task")
    for name in ("step_tag_id", "returned_token_ids"):
        if getattr(params, name) is not None and not (pooling.has_steps and task in TOKEN_TASKS):
            raise RequestError(
                f"{name} is for models that pool by STEP, and for their tokens' results (task "
                "token_embed or token_classify)",
                parameter=name,
            )
    if max(params.returned_token_ids or (-1,)) >= len(pooling.labels):
        raise RequestError(
            f"returned_token_ids: this model has {len(pooling.labels)} classes",
            parameter="returned_token_ids",
        )
    allowed = pooling.dimensions
    if (wanted := params.dimensions) is not None:
        if allowed is None:
            raise RequestError(
                f"dimensions={wanted}: the model does not declare is_matryoshka or "
                "matryoshka_dimensions, so its vectors cannot be shortened; leave dimensions out",
                parameter="dimensions",
            )
        if wanted > allowed if isinstance(allowed, int) else wanted not in allowed:
            expected = (
                f"at most {allowed}" if isinstance(allowed, int) else ", ".join(map(str, allowed))
            )
            raise RequestError(
                f"dimensions={wanted} is not possible with this model; expected {expected}",
                parameter="dimensions",
            )
    use_activation = (
        pooling.use_activation if params.use_activation is None else params.use_activation
    )
    return PoolingParams(
        task=task,
        dimensions=wanted,
        use_activation=use_activation,
        step_tag_id=params.step_tag_id,
        returned_token_ids=params.returned_token_ids,
    )
