"""The language model that a config names. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import ModelError

LATENT = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
"""The architectures with latent attention, by model_type."""
PLAIN = "DeepseekForCausalLM"
"""The architecture with DeepSeek's experts and ordinary attention."""
KINDS = ("deepseek", *LATENT)


def with_language(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a `text_config` that names the architecture of the language model.
    Raises ModelError for a model that cannot be built."""
    places = ("text_config", "language_config")
    given = next((config[name] for name in places if isinstance(config.get(name), Mapping)), None)
    kind = (given or {}).get("model_type", "deepseek_v2")
    if given is None or kind not in KINDS:
        raise ModelError(
            f"the checkpoint's config has language_config={given!r:.60}; expected an object with a "
            f"model_type of {', '.join(KINDS)}"
        )
    for name, expected in (("lm_head", True), ("rm_head", False)):
        if given.get(name, expected) is not expected:
            raise ModelError(
                f"the checkpoint's language_config has {name}={given[name]!r}; expected "
                f"{expected}, because a model that writes has a head for tokens"
            )
    language = dict(given)
    if is_plain(language):
        check_experts(language)
        if not language.get("head_dim"):
            language.pop("head_dim", None)
        architecture = PLAIN
    else:
        asked = language.get("architectures")
        names = asked if isinstance(asked, list | tuple) else ()
        stated = [name for name in names if name in LATENT.values()]
        architecture = stated[0] if stated else LATENT[kind]
    return {**config, "text_config": {**language, "architectures": [architecture]}}


def is_plain(language: Mapping[str, Any]) -> bool:
    """Return whether attention is ordinary and not latent. Raises ModelError."""
    asked = language.get("use_mla")
    if asked is not None and type(asked) is not bool:
        raise ModelError(
            f"the checkpoint's language_config has use_mla={asked!r}; expected true or false"
        )
    sides = [language.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    is_without = sides == [0, 0] if asked is None else not asked
    return is_without or language.get("model_type") == "deepseek"


def check_experts(language: Mapping[str, Any]) -> None:
    """Raise ModelError for a choice of experts that the architecture with ordinary attention does
    not have."""
    method = language.get("topk_method") or "greedy"
    groups = language.get("n_group") or 1
    if method != "greedy" and not (method == "group_limited_greedy" and groups == 1):
        raise ModelError(
            f"the checkpoint's language_config has topk_method={method!r} and n_group={groups!r} "
            "with ordinary attention (use_mla=false); expected 'greedy'. Models with latent "
            "attention may choose experts in groups"
        )
