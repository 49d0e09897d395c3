"""How a model's vectors are made, as its config and the files of sentence-transformers next to it
declare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from pegboard.data.checkpoint_file import read_object, read_text
from pegboard.data.pooling_params import Pooling, Task
from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.pooler import PoolerFacts
from pegboard.interfaces.weight_loader import Checkpoint

_STEPS = ("Transformer", "Pooling", "Normalize")
_MODES = "pooling_mode_"
_TYPES = {"lasttoken": "LAST", "cls_token": "CLS", "mean_tokens": "MEAN"}
_HEADS = (("score",), ("score.0", "score.2"), ("v_head",))
"""The paths of the layers in heads of decoders for classes and rewards."""
_TWO_WAY = "from_2_way_softmax"
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The setting `pooler_config`. The names are vLLM's.

    pooling_type: the final hidden state that becomes the vector: of the LAST token, of the first
    one (CLS), or the MEAN of all. use_activation: the default of requests that do not set it.
    """

    pooling_type: Literal["LAST", "CLS", "MEAN"] | None = None
    use_activation: bool | None = None


@dataclass(frozen=True)
class Declared:
    """What the files say. activation: what is applied to the vector, unless a request has
    use_activation=False."""

    task: Task = "embed"
    pooling_type: str = "LAST"
    activation: str = "normalize"
    use_activation: bool = True


def plan(facts: PoolerFacts) -> Pooling:
    """See `PoolerSpec.plan`. A vector of more than the last token is made of a whole prompt."""
    try:
        chosen = msgspec.convert(dict(facts.config), PoolerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"pooler_config: {error}") from error
    declared = _declared(facts)
    if chosen.pooling_type is not None:
        declared = replace(declared, pooling_type=chosen.pooling_type)
    if chosen.use_activation is not None:
        declared = replace(declared, use_activation=chosen.use_activation)
    config = facts.checkpoint.config
    tokens = class_tokens(config) if facts.convert == "classify" else ()
    is_two_way = bool(tokens) and is_difference(config, tokens)
    names = tokens[-1:] if is_two_way else tokens or labels(config)
    return Pooling(
        task=declared.task,
        labels=names if declared.task == "classify" else (),
        whole_prompts="encoder" in facts.flags or declared.pooling_type != "LAST",
        max_length=sentence_length(facts.checkpoint),
        use_activation=declared.use_activation,
        dimensions=_dimensions(config) if declared.task == "embed" else None,
        head=_head(facts) if facts.convert == "classify" and not tokens else None,
        method={
            "pooling_type": declared.pooling_type,
            "activation": declared.activation,
            **(_of_tokens(tokens, is_two_way) if tokens else {}),
        },
    )


def _of_tokens(tokens: Sequence[str], is_two_way: bool) -> dict[str, str]:
    """Return what the pooler needs to make values of classes of the logits of tokens."""
    method = {"tokens": json.dumps(tokens)}
    if is_two_way:
        method["subtracts"] = "yes"
    if is_two_way or len(tokens) == 1:
        method["activation"] = "sigmoid"
    return method


def class_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tokens whose logits are the values of classes, as vLLM's hf_overrides name them
    (`classifier_from_token`). Raises ModelError for something else than a list of strings."""
    tokens = config.get("classifier_from_token") or ()
    if not isinstance(tokens, list | tuple) or not all(isinstance(each, str) for each in tokens):
        raise ModelError(
            f'classifier_from_token is {tokens!r:.80}; expected a list of tokens, as ["no", "yes"]'
        )
    return tuple(tokens)


def is_difference(config: Mapping[str, Any], tokens: Sequence[str]) -> bool:
    """Return whether the score is made of the logit of the second token minus that of the first,
    whose sigmoid is the softmax of the two. Raises ModelError for a method that is not known."""
    is_original = config.get("is_original_qwen3_reranker") is True
    method = config.get("method") or (_TWO_WAY if is_original else "no_post_processing")
    if method not in (_TWO_WAY, "no_post_processing"):
        raise ModelError(f"method is {method!r:.60}; expected {_TWO_WAY} or no_post_processing")
    if method == _TWO_WAY and len(tokens) != 2:
        raise ModelError(
            f"{_TWO_WAY} takes two tokens in classifier_from_token, first the false one; got "
            f"{len(tokens)}"
        )
    return bool(method == _TWO_WAY)


def _head(facts: PoolerFacts) -> tuple[str, ...]:
    """Return the paths of the layers that make classes of a decoder's states."""
    tensors = facts.checkpoint.tensors
    for paths in _HEADS:
        if f"{paths[-1]}.weight" in tensors:
            return paths
    if tensors:
        raise ModelError(
            f"{facts.checkpoint.path} has no head for classes; expected a tensor score.weight. "
            "For scores that are logits of tokens, name these: --hf-overrides."
            'classifier_from_token \'["no", "yes"]\''
        )
    return _HEADS[0]


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | int | None:
    """Return to how many values a vector may be cut: a config has `is_matryoshka`, or lists
    `matryoshka_dimensions`. They can be set with hf_overrides. Raises ModelError for a list of
    something else."""
    if listed := config.get("matryoshka_dimensions"):
        if not isinstance(listed, list) or not all(type(size) is int for size in listed):
            raise ModelError(
                f"the checkpoint's config has matryoshka_dimensions={listed!r:.80}; expected a "
                "list of whole numbers"
            )
        return tuple(listed)
    size = config.get("hidden_size")
    return size if config.get("is_matryoshka") and isinstance(size, int) else None


def _declared(facts: PoolerFacts) -> Declared:
    flags = facts.flags
    checkpoint = facts.checkpoint
    if "classifier" in flags or facts.convert == "classify":
        of_config = str(checkpoint.config.get("classifier_pooling", "")).upper()
        if of_config not in ("", "CLS", "MEAN"):
            raise ModelError(
                f"{checkpoint.path}: classifier_pooling is {of_config!r:.60}; expected cls or mean"
            )
        default = "CLS" if "encoder" in flags else "LAST"
        activation = _class_activation(checkpoint.config)
        return Declared("classify", of_config or default, activation)
    declared = Declared(pooling_type="CLS" if "encoder" in flags else "LAST")
    path = checkpoint.path / "modules.json"
    if not path.is_file():
        return declared
    modules = _listed(path)
    names = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unknown := [name for name in names if name not in _STEPS]:
        raise ModelError(
            f"{path}: the step {unknown[0]!r:.80} is not supported; expected {', '.join(_STEPS)}"
        )
    for module, name in zip(modules, names, strict=True):
        if name == "Pooling":
            pooling_type = _pooling_type(checkpoint, str(module.get("path")))
            declared = replace(declared, pooling_type=pooling_type)
    return replace(declared, use_activation="Normalize" in names)


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
