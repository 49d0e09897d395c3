"""PoolingParams: how a prompt becomes one vector. Field names, defaults and ranges are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from pegboard.errors import RequestError

Task = Literal["embed", "classify"]


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine makes of prompts, as a pooler plugin has planned it.

    pooler: qualified name of the plugin. labels: the names of the classes. whole_prompts: a prompt
    must be computed in one step. max_length: the most tokens that the model was trained for, if its
    files say so. use_activation: the default of requests. dimensions: how many first values of a
    vector may be kept: one of these numbers, or any number up to this one; None = all of them.
    head: what takes the place of a decoder's head for text: the paths of linear layers in the
    checkpoint, with ReLU between them, and one row for each of the labels in the last; () =
    nothing, which is what models of vectors get; None = the model keeps its head. method: the
    plugin's own values.
    """

    pooler: str = ""
    task: Task = "embed"
    labels: tuple[str, ...] = ()
    whole_prompts: bool = False
    max_length: int | None = None
    use_activation: bool = True
    dimensions: tuple[int, ...] | int | None = None
    head: tuple[str, ...] | None = None
    method: Mapping[str, str] = {}


class PoolingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt becomes one vector: `embed` pools the final hidden states, `classify` has one value
    per class.

    truncate_prompt_tokens: the number of first tokens to keep; -1 keeps max_model_len. dimensions:
    keep only the first values, for models trained so (Matryoshka); the rest is normalized.
    use_activation: divide the vector by its Euclidean length, or make probabilities of the classes'
    values; None = as the model declares, else yes. task: what the caller expects; None = what the
    model does. Raises RequestError for a wrong value.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    task: Task | None = None

    def __post_init__(self) -> None:
        for name, least in (("truncate_prompt_tokens", -1), ("dimensions", 1)):
            value = getattr(self, name)
            if value is not None and (
                type(value) is not int or not least <= value < 2**31 or value == 0
            ):
                expected = "at least 1" + (", or -1 for max_model_len" if least < 0 else "")
                raise RequestError(
                    f"{name} must be an integer of {expected}, got {value!r:.60}", parameter=name
                )
        if self.use_activation is not None and type(self.use_activation) is not bool:
            raise RequestError(
                f"use_activation must be true or false, got {self.use_activation!r:.60}",
                parameter="use_activation",
            )
        if self.task not in (None, "embed", "classify"):
            raise RequestError(
                f"task must be embed or classify, got {self.task!r:.60}", parameter="task"
            )
