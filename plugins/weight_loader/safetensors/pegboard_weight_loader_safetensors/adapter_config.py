"""Reads the adapter_config.json of a LoRA adapter in PEFT's layout
(https://huggingface.co/docs/peft, `LoraConfig`).

The file says how the products B·A are scaled: by `lora_alpha` / `r`, or with `use_rslora` by
`lora_alpha` / √r (Kalajdzievski 2023), where `rank_pattern` and `alpha_pattern` replace both
numbers for some modules. What it says about modules (`target_modules`: a list, a regular expression
or "all-linear"; `layers_to_transform`) is not needed, because the tensors show which modules are
changed. So no expression of the file is ever run. What would change the result in another way is
refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegboard.data.checkpoint_file import read_object
from pegboard.errors import ModelError, brief

MAX_BYTES = 1 << 20
MAX_PATTERNS = 2_000

_BIASES = "adapters that change biases are not supported"
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "bias": ((None, "none"), _BIASES),
    "lora_bias": ((None, False), _BIASES),
    "use_dora": (
        (None, False),
        "DoRA is not supported, because it also changes the length of the weight's rows",
    ),
    "use_qalora": ((None, False), "QALoRA is not supported"),
    "use_bdlora": ((None, False), "BD-LoRA is not supported"),
    "modules_to_save": (
        (None, []),
        "an adapter with whole modules is not supported; merge these into the base model",
    ),
    "trainable_token_indices": (
        (None, [], {}),
        "an adapter with new token embeddings is not supported",
    ),
    "layer_replication": ((None, []), "repeated layers are not supported"),
    "alora_invocation_tokens": (
        (None,),
        "adapters that work from certain tokens on (aLoRA) are not supported",
    ),
    "arrow_config": ((None,), "routing between adapters (Arrow) is not supported"),
}
"""Key of the config → (values without an effect, why all others are refused)."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which training begins by changing the base model's
weights."""
_PLAIN = re.compile(r"(?:(?P<whole>\^)|\^?\.\*\\?\.)?(?P<name>\w(?:\w|\\?\.)*)")
"""A key of a pattern: the end of a module's path, or after "^" the whole path. A leading `.*.`
changes nothing, because PEFT puts the same before each key."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the product B·A of a module is scaled. alphas, ranks: end of a module's path, or "^" and
    the whole path → its own number. The first key that fits counts, as in PEFT."""

    rank: int
    alpha: float
    uses_root: bool
    alphas: Mapping[str, float]
    ranks: Mapping[str, int]

    def rank_of(self, module: str) -> int:
        """Return the rank that the config gives a module."""
        return int(_for_module(self.ranks, module) or self.rank)

    def of(self, module: str, rank: int) -> float:
        """Return the factor of a module whose matrices have this rank. Raises ModelError if the
        config gives another rank."""
        if (expected := self.rank_of(module)) != rank:
            raise ModelError(
                f"the matrices of {module} have rank {rank}, and adapter_config.json says "
                f"{expected}"
            )
        alpha = _for_module(self.alphas, module)
        return (self.alpha if alpha is None else alpha) / (
            math.sqrt(rank) if self.uses_root else rank
        )


def _for_module(values: Mapping[str, Any], module: str) -> Any:
    """Return the value of the first key that fits the module, or None."""
    return next(
        (
            value
            for key, value in values.items()
            if f".{module}".endswith(f".{key}") or key == f"^{module}"
        ),
        None,
    )


def read_scaling(path: Path) -> Scaling:
    """Read an adapter_config.json. Raises ModelError, which names the key, for one that is damaged
    or asks for what is not supported."""
    if not path.exists():
        raise ModelError(f"{path} is missing")
    config = read_object(path, MAX_BYTES)
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type is {brief(kind)}; only LORA adapters can be read")
    for key, (harmless, reason) in _REFUSED.items():
        if (value := config.get(key)) not in harmless:
            raise ModelError(f"{path}: {key} is {brief(value)}: {reason}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{path}: init_lora_weights is {brief(start)}: such an adapter fits only a base model "
            "that was changed before the training; convert it to a plain LoRA adapter (in PEFT: "
            "path_initial_model_for_weight_conversion)"
        )
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if not _is_rank(rank) or not _is_alpha(alpha):
        raise ModelError(
            f"{path}: expected a rank `r` of at least 1 and a number `lora_alpha`, got "
            f"{rank!r:.60} and {alpha!r:.60}"
        )
    uses_root = config.get("use_rslora")
    if uses_root not in (None, False, True):
        raise ModelError(f"{path}: use_rslora is {brief(uses_root)}, expected true or false")
    return Scaling(
        rank,
        alpha,
        bool(uses_root),
        _pattern(path, config, "alpha_pattern"),
        _pattern(path, config, "rank_pattern"),
    )


def _pattern(path: Path, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return `rank_pattern` or `alpha_pattern` by plain module names."""
    given = config.get(key) or {}
    fits = _is_rank if key == "rank_pattern" else _is_alpha
    if (
        not isinstance(given, dict)
        or len(given) > MAX_PATTERNS
        or not all(map(fits, given.values()))
    ):
        raise ModelError(f"{path}: {key} is {brief(given)}, expected module names with numbers")
    values = {}
    for name, value in given.items():
        match = _PLAIN.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{path}: {key} names modules by the expression {brief(name)}; only plain names "
                "can be read"
            )
        values.setdefault((match["whole"] or "") + match["name"].replace("\\", ""), value)
    return values


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31
