"""What files say about classes: their names, what makes probabilities of values, and which tokens
they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint

HEADS = (("score",), ("score.0", "score.2"), ("classifier",), ("v_head",))
"""The paths of the layers in heads of decoders for classes and rewards."""
TWO_WAY = "from_2_way_softmax"
ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}


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


def class_activation(config: Mapping[str, Any]) -> str:
    """Return what makes scores of the classes' values: what sentence-transformers has stored, or
    what the problem's type asks for."""
    stored = config.get("sentence_transformers")
    name = stored.get("activation_fn") if isinstance(stored, Mapping) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is not None:
        last = str(name).rpartition(".")[2]
        if last not in ACTIVATIONS:
            raise ModelError(
                f"the activation {name!r:.80} of the checkpoint's config is not known; expected "
                f"{', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[last]
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    return (
        "sigmoid"
        if problem == "multi_label_classification" or len(labels(config)) == 1
        else "softmax"
    )


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
    method = config.get("method") or (TWO_WAY if is_original else "no_post_processing")
    if method not in (TWO_WAY, "no_post_processing"):
        raise ModelError(f"method is {method!r:.60}; expected {TWO_WAY} or no_post_processing")
    if method == TWO_WAY and len(tokens) != 2:
        raise ModelError(
            f"{TWO_WAY} takes two tokens in classifier_from_token, first the false one; got "
            f"{len(tokens)}"
        )
    return bool(method == TWO_WAY)


def stored_head(checkpoint: Checkpoint) -> tuple[str, ...] | None:
    """Return the paths of the layers that make classes of a decoder's states, or None if the
    checkpoint has none."""
    tensors = checkpoint.tensors
    return next((paths for paths in HEADS if f"{paths[-1]}.weight" in tensors), None)


def head_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the paths of the layers that make classes of a decoder's states. Raises ModelError if
    there are none. Without an index of tensors (random weights), it is the most common head."""
    head = stored_head(checkpoint)
    if head is None and checkpoint.tensors:
        raise ModelError(
            f"{checkpoint.path} has no head for classes; expected a tensor score.weight. For "
            "scores that are logits of tokens, name these: --hf-overrides.classifier_from_token "
            '\'["no", "yes"]\''
        )
    return head or HEADS[0]
