"""The language model inside a model that also reads images, audio or video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build

ARCHITECTURES = {
    "aria_text": "AriaTextForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""The architecture of a text_config, by its model_type. What the text_config itself names is used
only for others, because some name an architecture of a program of their own."""

SIZES: Mapping[str, Mapping[str, int]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "opt": {
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
    },
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
}
"""The sizes that a text_config of this model_type lacks, as in transformers. Older checkpoints do
not write them."""


TIED = frozenset({"opt"})
"""Language models whose head is the embedding, if their config does not say."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, with its architecture. Raises ModelError if there is
    none."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or not (text.get("architectures") or kind in ARCHITECTURES):
        raise ModelError(
            f"the checkpoint's text_config has model_type={kind!r}; expected architectures, or one "
            f"of {', '.join(ARCHITECTURES)}"
        )
    is_tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings", kind in TIED)
    names = [ARCHITECTURES[str(kind)]] if kind in ARCHITECTURES else text["architectures"]
    sizes = SIZES.get(str(kind), {})
    return {**sizes, **text, "architectures": names, "tie_word_embeddings": bool(is_tied)}


def root_of(build: Build, part: str = "language_model") -> Build:
    """Return the build of the tower and the projector. part: the language model's name. In older
    checkpoints, names do not begin with "model"."""
    return build.at("model") if has_root(build, part) else build


def has_root(build: Build, part: str) -> bool:
    """Return whether all parts are below "model"."""
    return build.has(f"{build.at('model').path}.{part}")


def build_of_language(build: Build, part: str) -> Build:
    """Return the build of the language model, `part`. In the oldest checkpoints its tensors have
    the names that they have without the other parts."""
    root = build.at("model").path
    if has_root(build, part):
        return replace(build, renamed={**build.renamed, "model": f"{root}.{part}"})
    return build if build.has(f"{root}.layers") else build.at(part)


def build_within(build: Build, whole: str, parts: Sequence[str]) -> Build:
    """Return the build of a model that is `whole` in checkpoints of several models. parts: its
    modules. Checkpoints of only this model do not have `whole` in their names."""
    if not build.has(whole):
        return build
    names = {part: f"{whole}.{part}" for part in parts}
    return replace(build, renamed={**build.renamed, **names})


class LanguageStages(nn.Module):
    """The stages of a `Model`, which are those of `language`. `embed` takes token ids, so a
    placeholder's row is that of its token until the rows of the item take its place."""

    language: Any

    def embed(self, input_ids: Tensor, *more: Tensor) -> Tensor:
        rows: Tensor = self.language.embed(input_ids, *more)
        return rows

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        states: Tensor = self.language.forward(hidden, *positions)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.language.logits(hidden)
        return values


class WithLanguageModel(LanguageStages):
    """A model whose config has a text_config. part: what checkpoints call the language model."""

    part = "language_model"

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        inner = build_of_language(build, self.part)
        self.language = inner.language_model(text_config(config))
        part = self.part
        root = build.at("model").path
        head = build.at("lm_head").path
        names = {
            "model": (f"model.{part}", f"{part}.model", f"{root}.{part}", root),
            "lm_head": (f"{part}.lm_head", head),
        }
        for name, others in names.items():
            path = inner.at(name).path
            aliases = {other: path for other in (*others, name) if other != path}
            build.declared.aliases.update(aliases)
