"""The JSON files of a checkpoint in Hugging Face layout. This module does not import torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pegboard.data.checkpoint_file import read_object, read_text
from pegboard.errors import ModelError

_BESIDE = ("eos_token_id", "dtype", "torch_dtype")
_UNNAMED = {"deepseek_vl_v2": ("DeepseekVLV2ForCausalLM",)}
"""The architectures of configs that name none, by their model_type."""
_BESIDE_CONFIG = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files beside a config without `quantization_config` that have its values, in the order in which
they are looked for → the method of files that name none. NVIDIA's Model Optimizer, GPTQ and AWQ
wrote them before configs had such values. AWQ also wrote GPTQ's file, with `w_bit` in it."""
_NEW_TOKENS = 128
"""The tokens that Molmo reads and never writes."""


def read_optional(path: Path) -> dict[str, Any]:
    """Like `read_object`, but return {} if there is no such file."""
    return read_object(path) if path.is_file() else {}


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        is_mistral = (directory / "params.json").is_file()
        raise ModelError(
            f"{directory} has no config.json; expected a model in Hugging Face layout"
            + ("; --load-format mistral reads its params.json" if is_mistral else "")
        )
    config: dict[str, Any] = decoded(read_object(path))
    return with_vocabulary(with_text(config))


def with_vocabulary(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with its padded_vocab_size, if the model has a second table of embeddings
    that the config does not tell (Molmo)."""
    size = config.get("embedding_size") or config.get("vocab_size")
    if config.get("model_type") != "molmo" or type(size) is not int:
        return config
    return {"padded_vocab_size": size + _NEW_TOKENS, **config}


def with_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the text_config of the part that reads and writes, if it has another
    name for it: a whole of several models (Qwen-Omni), `llm_config` (InternVL), or
    `language_config` (DeepSeek-VL2). The text_config gets what this part says beside it."""
    for name in ("llm_config", "language_config"):
        if isinstance(config.get(name), Mapping):
            return {"text_config": config[name], **config}
    thinker = config.get("thinker_config")
    text = thinker.get("text_config") if isinstance(thinker, Mapping) else None
    if not isinstance(thinker, Mapping) or not isinstance(text, Mapping):
        return config
    beside = {name: thinker[name] for name in _BESIDE if name in thinker and text.get(name) is None}
    return {"text_config": {**text, **beside}, **config}


def decoded(value: Any) -> Any:
    """Return a JSON value with its special floats: transformers 5 writes infinity as {"__float__":
    "Infinity"}."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: decoded(item) for name, item in value.items()}


@cache
def config_defaults() -> dict[str, dict[str, Any]]:
    """Return the values that models of a type have if their config has none, by `model_type` and
    name."""
    return tomllib.loads(Path(__file__).with_name("config_defaults.toml").read_text("utf-8"))


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, and its text part, with the values that it lacks. A value that is null stays
    null."""
    kind = config.get("model_type")
    values = dict(config_defaults().get(kind, {}) if isinstance(kind, str) else {})
    if config.get("rope_parameters") or config.get("rope_scaling") or config.get("rope_theta"):
        values.pop("rope_parameters", None)
    nested = config.get("text_config")
    text = {"text_config": with_defaults(nested)} if isinstance(nested, Mapping) else {}
    return {**values, **config, **text}


def architectures(config: Mapping[str, Any], directory: Path) -> tuple[str, ...]:
    """Return `architectures` of a config, or () if it names none and its model_type has no usual
    one. Raises ModelError if it is not a list of names."""
    names = config.get("architectures") or []
    if not names:
        return _UNNAMED.get(str(config.get("model_type")), ())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"{directory / 'config.json'} has architectures {names!r}, expected a list of class "
            "names"
        )
    if names == ["ChatGLMModel"] and config.get("vision_config"):
        return ("GLM4VForCausalLM",)  # GLM-4V has the name of its language model
    return tuple(names)


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the type of the weights that the config (or its text part) names, as a torch name."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str):
            return name.removeprefix("torch.")
    return None


def quantization_config(config: Mapping[str, Any], directory: Path) -> dict[str, Any] | None:
    """Return the config's `quantization_config`, or else what a file beside it has (see
    `_BESIDE_CONFIG`), or None. Raises ModelError if the former is not an object."""
    quantization = config.get("quantization_config")
    if quantization is None:
        for name, method in _BESIDE_CONFIG.items():
            written = read_optional(directory / name)
            method = "awq" if "w_bit" in written else method
            if written:
                return {"quant_method": method, **written}
        return None
    if not isinstance(quantization, dict):
        raise ModelError(
            f"{directory / 'config.json'} has quantization_config {quantization!r}, expected an "
            "object"
        )
    return quantization or None


def chat_template(directory: Path) -> str | None:
    """Return the template in chat_template.jinja, otherwise in chat_template.json, otherwise in
    tokenizer_config.json. If there are several named templates, return the one with the name
    "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path)

    def is_default(item: object) -> bool:
        return isinstance(item, Mapping) and item.get("name") == "default"

    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_optional(directory / name).get("chat_template")
        if isinstance(template, list):
            template = next((item.get("template") for item in template if is_default(item)), None)
        if isinstance(template, str):
            return template
    return None
