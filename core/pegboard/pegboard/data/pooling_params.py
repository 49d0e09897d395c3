"""PoolingParams: what a prompt becomes. Field names, defaults and ranges are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from pegboard.errors import RequestError

Task = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[Task, ...] = get_args(Task)
TOKEN_TASKS = frozenset({"token_embed", "token_classify"})
"""The tasks whose result is a matrix with one row for each token."""


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine makes of prompts, as a pooler plugin has planned it.

    pooler: qualified name of the plugin. task: of requests that name none. tasks: others that
    requests may name. labels: the names of the classes. whole_prompts: a prompt must be computed in
    one step. from_start: the tasks that need the states of all tokens, so their prompts are not
    read from the prefix cache. has_steps: requests may have step_tag_id and returned_token_ids.
    max_length: the most tokens that the model was trained for, if its files say so. use_activation:
    the default of requests. dimensions: how many first values of a vector may be kept: one of these
    numbers, or any number up to this one; None = all of them. head: what takes the place of a
    decoder's head for text: the paths of linear layers in the checkpoint, with ReLU between them,
    and one row for each of the labels in the last; () = nothing, which is what models of vectors
    get; None = the model keeps its head. max_embed_len: servers take texts of up to so many tokens
    for `embed`, in chunks of the model's length, and return the mean of their vectors; None = they
    do not. prompts: name → what is put before a text. prompt_name: the name for requests that give
    none; None = nothing is. sees_all: each token of a decoder attends to all of its prompt, also to
    those after it, which a plan may say; whole_prompts is then true. method: the plugin's own
    values.
    """

    pooler: str = ""
    task: Task = "embed"
    tasks: tuple[Task, ...] = ()
    labels: tuple[str, ...] = ()
    whole_prompts: bool = False
    from_start: tuple[Task, ...] = ()
    has_steps: bool = False
    max_length: int | None = None
    use_activation: bool = True
    dimensions: tuple[int, ...] | int | None = None
    head: tuple[str, ...] | None = None
    max_embed_len: int | None = None
    prompts: Mapping[str, str] = {}
    prompt_name: str | None = None
    sees_all: bool = False
    method: Mapping[str, str] = {}

    @property
    def makes(self) -> Literal["embed", "classify"]:
        """What the model makes, of whole prompts or of their tokens."""
        return "embed" if self.task in ("embed", "token_embed") else "classify"


class PoolingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a prompt becomes: `embed` makes a vector of the final hidden states, `classify` one
    value for each class; `token_embed` and `token_classify` do so for each token.

    truncate_prompt_tokens: the number of first tokens to keep; -1 keeps max_model_len. dimensions:
    keep only the first values, for models trained so (Matryoshka); the rest is normalized.
    use_activation: divide vectors by their Euclidean length, or make probabilities of the classes'
    values; None = as the model declares, else yes. step_tag_id: return only the rows of tokens with
    this id, of a model that pools by STEP. returned_token_ids: the columns that it returns. task:
    what the caller expects; None = what the model does. prompt_name: what to put before a text, as
    sentence-transformers calls it; "" = nothing; None = the model's default. Raises RequestError
    for a wrong value.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    task: Task | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("truncate_prompt_tokens", -1),
            ("dimensions", 1),
            ("step_tag_id", 0),
        ):
            value = getattr(self, name)
            if value is not None and (
                type(value) is not int or not least <= value < 2**31 or (value == 0 and least)
            ):
                expected = f"at least {abs(least)}"
                expected += ", or -1 for max_model_len" if least < 0 else ""
                raise RequestError(
                    f"{name} must be an integer of {expected}, got {value!r:.60}", parameter=name
                )
        if self.prompt_name is not None and type(self.prompt_name) is not str:
            raise RequestError(
                f"prompt_name must be a text, got {self.prompt_name!r:.60}", parameter="prompt_name"
            )
        if self.returned_token_ids is not None:
            self.returned_token_ids = checked_ids(self.returned_token_ids)
        if self.use_activation is not None and type(self.use_activation) is not bool:
            raise RequestError(
                f"use_activation must be true or false, got {self.use_activation!r:.60}",
                parameter="use_activation",
            )
        if self.task is not None and self.task not in TASKS:
            raise RequestError(
                f"task must be one of {', '.join(TASKS)}; got {self.task!r:.60}", parameter="task"
            )


def checked_ids(ids: object) -> tuple[int, ...]:
    """Return the columns to return. Raises RequestError."""
    if (
        not isinstance(ids, list | tuple)
        or not ids
        or not all(type(each) is int and 0 <= each < 2**31 for each in ids)
    ):
        raise RequestError(
            f"returned_token_ids must be a list of token ids, got {ids!r:.60}",
            parameter="returned_token_ids",
        )
    return tuple(ids)
