"""What the files of sentence-transformers say: the steps after the transformer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegboard.data.checkpoint_file import read_object, read_text
from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint

STEPS = ("Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Dense", "Normalize")
MODE = "pooling_mode_"
TYPES = {
    "cls_token": "CLS",
    "max_tokens": "MAX",
    "mean_tokens": "MEAN",
    "mean_sqrt_len_tokens": "MEAN_SQRT",
    "lasttoken": "LAST",
}
"""How sentence-transformers names ways to pool, in the order in which it joins their vectors."""
WORD_ACTIVATIONS = ("relu", "log1p_relu")
"""What SPLADE makes of logits before the log of 1 + x."""
DENSE_FILE = "model.safetensors"
DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")


@dataclass(frozen=True)
class Steps:
    """pooling_types: of the vectors that are joined; () = the steps apply to each token. dense: the
    file and the activation of each linear layer, in order. normalizes: the last step does.
    leaves_out_prompts: the tokens of a prompt of sentence-transformers do not count. words: not the
    states are pooled, but log(1 + x) of this activation x of the logits of words; "" = the states
    are."""

    pooling_types: tuple[str, ...] = ()
    dense: tuple[tuple[str, str], ...] = ()
    normalizes: bool = False
    leaves_out_prompts: bool = False
    words: str = ""


def read_steps(checkpoint: Checkpoint) -> Steps | None:
    """Return the steps that modules.json lists, or None if there is no such file. Raises ModelError
    for others."""
    path = checkpoint.path / "modules.json"
    if not path.is_file():
        return None
    modules = listed(path)
    names = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unknown := [name for name in names if name not in STEPS]:
        raise ModelError(
            f"{path}: the step {unknown[0]!r:.80} is not supported; expected {', '.join(STEPS)}"
        )
    order = [name for name in names if name in ("Pooling", "Dense", "SpladePooling")]
    if order[1:].count("Pooling"):
        raise ModelError(f"{path}: the step Pooling must come once, before the steps Dense")
    if "SpladePooling" in order and len(order) > 1:
        raise ModelError(f"{path}: the step SpladePooling must come once, and without others")
    folders = {
        name: [
            str(module.get("path"))
            for module, each in zip(modules, names, strict=True)
            if each == name
        ]
        for name in STEPS
    }
    if folders["SpladePooling"]:
        return words(checkpoint, folders["SpladePooling"][0], "Normalize" in names)
    types = [pooling_types(checkpoint, folder) for folder in folders["Pooling"]]
    files = [within(checkpoint, folder, "config.json") for folder in folders["Pooling"]]
    return Steps(
        leaves_out_prompts=any(read_object(file).get("include_prompt") is False for file in files),
        pooling_types=types[0] if types else (),
        dense=tuple(dense(checkpoint, folder) for folder in folders["Dense"]),
        normalizes="Normalize" in names,
    )


def listed(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} must contain a list of objects, one per step")
    return modules


def within(checkpoint: Checkpoint, folder: str, name: str) -> Path:
    """Return the path of a step's file. Raises ModelError if it is not in the model's folder."""
    root = checkpoint.path.resolve()
    path = (root / folder / name).resolve()
    if not path.is_relative_to(root):
        raise ModelError(
            f"{checkpoint.path / 'modules.json'}: the path {folder!r:.80} leaves the model's folder"
        )
    return path


def pooling_types(checkpoint: Checkpoint, folder: str) -> tuple[str, ...]:
    """Return how a step Pooling makes vectors."""
    path = within(checkpoint, folder, "config.json")
    config = read_object(path)
    modes = [name.removeprefix(MODE) for name, is_on in config.items() if is_on]
    modes = [mode for mode in modes if f"{MODE}{mode}" in config]
    if not modes or not set(modes) <= set(TYPES):
        raise ModelError(
            f"{path}: the model pools by {', '.join(modes) or 'nothing'}; supported: "
            f"{', '.join(TYPES)}"
        )
    return tuple(TYPES[mode] for mode in TYPES if mode in modes)


def words(checkpoint: Checkpoint, folder: str, normalizes: bool) -> Steps:
    """Return what a step SpladePooling does."""
    path = within(checkpoint, folder, "config.json")
    config = read_object(path)
    strategy = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    for name, value, known in (
        ("pooling_strategy", strategy, ("max", "sum")),
        ("activation_function", activation, WORD_ACTIVATIONS),
    ):
        if value not in known:
            raise ModelError(f"{path}: {name} is {value!r:.60}; expected {' or '.join(known)}")
    return Steps((str(strategy).upper(),), normalizes=normalizes, words=str(activation))


def dense(checkpoint: Checkpoint, folder: str) -> tuple[str, str]:
    """Return the file and the activation of a step Dense."""
    path = within(checkpoint, folder, "config.json")
    activation = str(read_object(path).get("activation_function")).rpartition(".")[2]
    if activation not in DENSE_ACTIVATIONS:
        raise ModelError(
            f"{path}: the activation_function {activation!r:.60} is not known; expected "
            f"{', '.join(DENSE_ACTIVATIONS)}"
        )
    weights = within(checkpoint, folder, DENSE_FILE)
    if not weights.is_file():
        raise ModelError(f"{weights} is missing; the step Dense needs it")
    return str(weights), activation


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


def sentence_prompts(checkpoint: Checkpoint) -> tuple[dict[str, str], str | None]:
    """Return the prompts of sentence-transformers, name → what is put before a text, and the name
    that counts if none is given. Raises ModelError for something else."""
    path = checkpoint.path / "config_sentence_transformers.json"
    config = read_object(path) if path.is_file() else {}
    prompts = config.get("prompts") or {}
    name = config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be an object of texts, got {prompts!r:.80}")
    if name is not None and name not in prompts:
        raise ModelError(f"{path}: default_prompt_name is {name!r:.60}, which is not in prompts")
    return prompts, name
