"""How torchao's configs round activations.

A config is stored as {"_type": its class, "_data": its values}. `granularity` is of activations and
weights, or a list of both. A `FqnToConfig` has a config for each path of a module, each regular
expression of paths ("re:…") and all other modules ("_default"). Of these, the first kind that names
a module counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pegboard_weights.asked_rounding import AskedRounding
from pegboard_weights.config import matches
from pegboard_weights.stored_weight import Form

DEFAULT = "_default"
FLOAT8 = "float8_e4m3fn"
TOKEN = "PerRow"
STEP = "PerTensor"
SYMMETRIC = "SYMMETRIC"
KINDS: Mapping[str, tuple[Form, str, str, str]] = {
    "Int8DynamicActivationInt8WeightConfig": ("block_weight", "int8", TOKEN, SYMMETRIC),
    "Int8DynamicActivationInt4WeightConfig": ("block_weight", "int8", TOKEN, "ASYMMETRIC"),
    "Int8DynamicActivationIntxWeightConfig": ("block_weight", "int8", TOKEN, "ASYMMETRIC"),
    "Float8DynamicActivationFloat8WeightConfig": ("code_weight", FLOAT8, STEP, SYMMETRIC),
    "Float8DynamicActivationInt4WeightConfig": ("block_weight", FLOAT8, TOKEN, SYMMETRIC),
}
"""Classes of configs → the form of weights, the type of activations, and the values that a config
has if it does not say them: what shares a scale, and whether there are zero points."""
OLD = {
    "int8_dynamic_activation_int8_weight": "Int8DynamicActivationInt8WeightConfig",
    "float8_dynamic_activation_float8_weight": "Float8DynamicActivationFloat8WeightConfig",
}
"""Names that older checkpoints have instead of a config."""
Asked = tuple[Form, AskedRounding]


def is_dynamic(config: object) -> bool:
    """Return whether a config, or one in it, rounds activations, also in a way that is unknown."""
    return "dynamic" in str(config).lower()


def configs_by_module(quant_type: object) -> dict[str, object]:
    """Return the configs in `quant_type` of a checkpoint by the modules that they are for: as in a
    `FqnToConfig`."""
    config = quant_type
    if isinstance(config, Mapping) and "_type" not in config:
        config = config.get("default")
    data = config.get("_data") if isinstance(config, Mapping) else None
    for name in ("fqn_to_config", "module_fqn_to_config"):
        inner = data.get(name) if isinstance(data, Mapping) else None
        if isinstance(inner, Mapping) and inner:
            values: Mapping[str, object] = inner.get("_data", inner)
            return dict(values)
    return {DEFAULT: config}


def config_of(module: str, configs: Mapping[str, object]) -> object:
    """Return the config of a module. None = it is plain."""
    if module in configs:
        return configs[module]
    patterns: Iterable[str] = (name for name in configs if name.startswith("re:"))
    chosen = next((name for name in patterns if matches(module, [name])), DEFAULT)
    return configs.get(chosen)


def asked_by(config: object) -> Asked | None:
    """Return the form of a config's weights and how activations are rounded, or None if they are
    not, or in a way that is not computed."""
    name = OLD.get(str(config), "")
    data: Any = {}
    if isinstance(config, Mapping):
        name = str(config.get("_type"))
        data = config.get("_data") or {}
    if name not in KINDS:
        return None
    form, kind, owner, mapping = KINDS[name]
    granularity = data.get("granularity")
    granularity = granularity[0] if isinstance(granularity, list) and granularity else granularity
    owner = str(_value(granularity, "_type") or owner)
    mapping = str(_value(data.get("act_mapping_type"), "_data") or mapping)
    if owner not in (TOKEN, STEP, "PerToken") or mapping not in (SYMMETRIC, "ASYMMETRIC"):
        return None
    is_symmetric = mapping == SYMMETRIC or kind != "int8"
    return form, AskedRounding(kind, is_symmetric=is_symmetric, is_shared=owner == STEP)


def _value(stored: object, name: str) -> object:
    return stored.get(name) if isinstance(stored, Mapping) else stored
