"""Reads a checkpoint's config: applies the user's overrides, and derives lengths and ids. Imports
no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pegboard.config.limits import AUTO_LEN
from pegboard.errors import ConfigError, ModelError, PegboardError, brief
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.log import get_logger

log = get_logger(__name__)

FALLBACK_MAX_MODEL_LEN = 2048

_LENGTH_KEYS = (
    "max_position_embeddings",
    "model_max_length",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "n_ctx",
    "max_target_positions",
)
_ROPE_NUMBERS = {
    *(
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "alpha",
        "mixed_b",
    ),
    *(
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
    ),
}


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the user's overrides. Configs name rotary settings in one of two ways.
    An override in the other way is translated to the config's, because every reader takes only one.
    Raises ConfigError if it cannot be translated."""
    merged = {**config, **overrides}
    rope = config.get("rope_parameters")
    names = overrides.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"hf_overrides: architectures is {brief(names)}, expected a list of names"
        )
    rope_names = {"rope_theta", "rope_scaling"} & overrides.keys()
    if "rope_parameters" in overrides:
        merged.pop("rope_scaling", None)
    elif rope_names and isinstance(rope, Mapping):
        if any(isinstance(part, Mapping) for part in rope.values()):
            raise ConfigError(
                "hf_overrides: the model has rope_parameters per type of layer; override them, "
                f"not {min(rope_names)}"
            )
        kept = {
            name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope
        }
        scaling = (
            {**kept, **(overrides["rope_scaling"] or {})}
            if "rope_scaling" in overrides
            else dict(rope)
        )
        if "rope_theta" in overrides:
            scaling["rope_theta"] = overrides["rope_theta"]
        merged = {name: value for name, value in merged.items() if name not in rope_names} | {
            "rope_parameters": scaling
        }
    return merged


@contextmanager
def overriding(overrides: Mapping[str, Any] | None) -> Iterator[None]:
    """Read, in the block, a config that has the user's overrides, which may be of any type. Raises
    ConfigError if that fails."""
    try:
        yield
    except Exception as error:
        # no reader checks all types, and the config of a checkpoint was checked before
        if isinstance(error, PegboardError) or not overrides:
            raise
        reason = f"{type(error).__name__}: {brief(str(error), 200)}"
        raise ConfigError(
            f"the model's config cannot be read with hf_overrides={brief(overrides, 200)} "
            f"({reason})"
        ) from error


def rope_parameters(config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return (base, scaling) from a Hugging Face config, whether it has `rope_theta` and
    `rope_scaling` or `rope_parameters`. Raises ModelError if these are not objects, or if a value
    that every rule reads as a number or a name is something else."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise ModelError(
            f"the model's config has rope_parameters or rope_scaling {brief(values)}, expected an "
            "object"
        )
    parameters = dict(values)
    if original := config.get("original_max_position_embeddings"):
        parameters["original_max_position_embeddings"] = original
    base = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    for name, value in (*parameters.items(), ("rope_theta", base)):
        if name in ("rope_type", "type") and value is not None and not isinstance(value, str):
            raise ModelError(
                f"the model's config has {name}={brief(value)} in its rotary settings, expected a "
                "name"
            )
        is_number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and (value == 0 or 1e-9 <= value <= 1e30)
        )
        if name in _ROPE_NUMBERS and value is not None and not is_number:
            raise ModelError(
                f"the model's config has {name}={brief(value)}, expected 0 or a number from 1e-9 "
                "to 1e30"
            )
    return float(base), parameters


def max_model_len(config: Mapping[str, Any], asked: int | str | None) -> int:
    """Return the maximum length of prompt plus output, in tokens: the user's value, or the model's
    limit if that is None or in AUTO_LEN. Raises ConfigError if the user's value exceeds the
    limit."""
    asked = None if asked is None or asked in AUTO_LEN else int(asked)
    limit = own_limit(config)
    if limit is None:
        if asked is None:
            log.warning(
                "the checkpoint names no maximum length; using %d (set max_model_len to change it)",
                FALLBACK_MAX_MODEL_LEN,
            )
        return asked or FALLBACK_MAX_MODEL_LEN
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len={asked} exceeds the model's limit of {limit} tokens; lower it, or "
            "change the limit with hf_overrides={'max_position_embeddings': …} if you know "
            "that the model supports it"
        )
    return asked or limit


def own_limit(config: Mapping[str, Any]) -> int | None:
    """Return the maximum length that a checkpoint names, in tokens; None = it names none."""
    config = text_config(config)
    lengths = [int(config[key]) for key in _LENGTH_KEYS if config.get(key)]
    if not lengths:
        return None
    limit = min(lengths)
    if limit < 1:
        raise ModelError(
            f"the model's config has a maximum length of {limit} tokens, expected at least 1"
        )
    return stretched(rope_parameters(config)[1], limit)


def stretched(scaling: Mapping[str, Any], limit: int) -> int:
    """Return the length that rotary scaling makes of a model's `limit`. YaRN stretches its original
    length."""
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = float(scaling.get("factor") or 1.0)
    if str(kind).endswith("yarn"):
        return max(
            1,
            int(float(scaling.get("original_max_position_embeddings") or limit / factor) * factor),
        )
    return max(1, int(limit * factor)) if kind in ("linear", "dynamic", "ntk") else limit


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a multimodal config, or the config itself if it is not
    multimodal."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def vocab_size(checkpoint: Checkpoint) -> int:
    config = text_config(checkpoint.config)
    size = config.get("padded_vocab_size", config.get("vocab_size"))
    if not isinstance(size, int) or size < 1:
        raise ModelError(
            f"{checkpoint.path}: the checkpoint's config has vocab_size={size!r}, expected a "
            "positive number"
        )
    return size


def eos_token_ids(num_tokens: int, configs: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the ids that end an output, without duplicates. An id outside the vocabulary of
    `num_tokens` can never be generated, so it is left out with a warning. Raises ModelError if a
    value is not an id or a list of ids."""
    token_ids: list[int] = []
    for config in configs:
        for part in (config, text_config(config)):
            value = part.get("eos_token_id")
            token_ids += (
                value if isinstance(value, list | tuple) else [] if value is None else [value]
            )
    if wrong := [token for token in token_ids if type(token) is not int]:
        raise ModelError(
            f"the checkpoint has eos_token_id {repr(wrong[0])[:80]}, expected a token id or a "
            "list of token ids"
        )
    if outside := [token for token in token_ids if not 0 <= token < num_tokens]:
        log.warning(
            "eos_token_id %s is outside the vocabulary of %d tokens and is ignored",
            str(outside[0])[:80],
            num_tokens,
        )
    return tuple(dict.fromkeys(token for token in token_ids if 0 <= token < num_tokens))
