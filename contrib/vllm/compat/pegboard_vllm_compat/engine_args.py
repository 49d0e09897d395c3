"""EngineArgs: the settings of an engine as a dataclass, whose fields can be flags of a script."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from pegboard import EngineConfig

SWITCHES = (
    "async_scheduling",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "disable_hybrid_kv_cache_manager",
    "disable_sliding_window",
    "enable_dbo",
    "enable_lora",
    "kv_sharing_fast_prefill",
    "skip_mm_profiling",
    "use_tqdm_on_load",
)
TEXTS = (
    "code_revision",
    "config_format",
    "data_parallel_backend",
    "hf_config_path",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "otlp_traces_endpoint",
    "override_attention_dtype",
    "safetensors_load_strategy",
    "scheduler_cls",
    "tokenizer_revision",
    "worker_cls",
)
NUMBERS = ("max_parallel_loading_workers", "swap_space", "ubatch_size", "video_pruning_rate")
MAPPINGS = (
    "additional_config",
    "attention_config",
    "compilation_config",
    "ec_transfer_config",
    "kv_events_config",
    "kv_transfer_config",
    "model_loader_extra_config",
    "profiler_config",
    "speculative_config",
)
"""Names of vLLM's settings that are not settings of Pegboard, by type. `LLM` translates them or
refuses them with a reason."""
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def number(text: str) -> int:
    """Return the integer that vLLM's flags take: 4096, 4k, 4K or 25.6k."""
    factor = _UNITS.get(text[-1:])
    return int(text) if factor is None else int(float(text[:-1]) * factor)


def value_of(text: str) -> Any:
    """Return a value of JSON, or the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _plain(hint: Any) -> Any:
    """Return the type behind Annotated and None."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        others = [one for one in get_args(hint) if one is not type(None)]
        return _plain(others[0])
    return hint


def _form(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a type."""
    plain = _plain(hint)
    origin = get_origin(plain) or plain
    if origin is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        return {"choices": get_args(plain)}
    if origin is list:
        return {"nargs": "+"}
    if origin in (dict, Mapping, Any):
        return {"type": value_of}
    return {"type": {int: number, float: float}.get(origin, str)}


def _hints() -> dict[str, Any]:
    """Return field → type, first of Pegboard's settings and then of vLLM's other ones."""
    hints = {field.name: field.type for field in msgspec.structs.fields(EngineConfig)}
    typed = ((SWITCHES, bool), (TEXTS, str), (NUMBERS, float), (MAPPINGS, dict))
    hints["logits_processors"] = list
    hints["io_processor_plugin"] = str
    return hints | {name: hint for names, hint in typed for name in names}


HINTS = _hints()
DEFAULTS = EngineConfig()


class _Flags:
    """The class methods of `EngineArgs`."""

    @classmethod
    def add_cli_args(cls, parser: Any) -> Any:
        """Add a flag for each field and return the parser."""
        group = parser.add_argument_group("EngineArgs")
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            default = getattr(DEFAULTS, field.name, None)
            name = f"--{field.name.replace('_', '-')}"
            group.add_argument(name, default=default, **_form(HINTS.get(field.name, bool)))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        """Return the fields that a parsed command line has."""
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def _field(name: str) -> tuple[str, Any, Any]:
    value = getattr(DEFAULTS, name, None)
    if isinstance(value, list | dict):
        return name, Any, dataclasses.field(default_factory=type(value))
    return name, Any, dataclasses.field(default=value)


EngineArgs: Any = dataclasses.make_dataclass(
    "EngineArgs",
    [_field(name) for name in HINTS],
    bases=(_Flags,),
    namespace={"__module__": __name__},
)
AsyncEngineArgs: Any = dataclasses.make_dataclass(
    "AsyncEngineArgs",
    [("enable_log_requests", bool, dataclasses.field(default=False))],
    bases=(EngineArgs,),
    namespace={"__module__": __name__},
)


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults, so that a script can pass on everything
    that EngineArgs has. `disable_log_stats` is always among them, because LLM has another default.
    """
    return {
        name: value
        for name, value in values.items()
        if name == "disable_log_stats"
        or (value != getattr(DEFAULTS, name, None) and name != "enable_log_requests")
    }


def of_args(args: Any) -> dict[str, Any]:
    """Return the settings of an EngineArgs."""
    names = [field.name for field in dataclasses.fields(args)]
    return settings_of({name: getattr(args, name) for name in names})
