"""What users can ask of a running engine besides requests: one class per action, with its arguments
and its documentation.

`engine/controls.py` carries them out. `front/controls.py` makes methods of `AsyncLLM`, `LLMEngine`
and `LLM` from them. API plugins call them by their tag (`EngineClient.control`). A new action is a
class here, a line in `AnyAction`, and a handler in `engine/controls.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from pegboard.data.request import LoRARequest
from pegboard.errors import RequestError

R = TypeVar("R")

PauseMode = Literal["abort", "wait", "keep"]
"""How a pause treats the requests that the engine has: they end with finish reason "abort", they
run to their end, or they stop and go on after the pause."""

TAGS = ("weights", "kv_cache")
"""The parts of the memory that sleep releases."""


class Action(msgspec.Struct, Generic[R], tag_field="action", forbid_unknown_fields=True):
    """R: the type of the answer. Making one raises RequestError if an argument is wrong."""


class Stats(Action[dict[str, Any]], tag="stats"):
    """Return current numbers, totals since the start, and how many blocks each running request
    holds in each KV group."""


class Decisions(Action[list[dict[str, Any]]], tag="decisions"):
    """Return the plugins that were chosen for the engine, and why."""


class ResetPrefixCache(Action[bool], tag="reset_prefix_cache"):
    """Forget all cached blocks. Return False and do nothing while some are in use, unless
    `reset_running_requests` makes the running requests compute their tokens again."""

    reset_running_requests: bool = False


class StartProfile(Action[None], tag="start_profile"):
    """Start the platform's profiler, which writes below the folder `path`."""

    path: str


class StopProfile(Action[None], tag="stop_profile"):
    """Stop the profiler and write what it measured."""


class CollectiveRpc(Action[list[Any]], tag="collective_rpc"):
    """Call a method of the worker extension (`worker_extension_cls`) between two steps, and return
    the results in rank order. Arguments and results are plain values: numbers, strings, bytes,
    lists, dicts. In the engine's own process, `method` may be a function that takes the worker, and
    anything may be passed. Raises RequestError if there is no such method. An error of the method
    is raised here."""

    method: Any
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = {}


class InitWeightTransfer(Action[None], tag="init_weight_transfer_engine"):
    """Connect the workers to a trainer in another process, which sends weights to
    `update_weights`. init_info: where the trainer is, as the plugin of `weight_transfer` defines
    it. Raises RequestError if it is wrong, or if the trainer does not come."""

    init_info: Mapping[str, Any]


class UpdateWeights(Action[None], tag="update_weights"):
    """Replace the weights by those of another checkpoint of the same model: a folder or file on the
    engine's machine, or tensors that a trainer sends (`weight_transfer`). update_info: names,
    dtype_names and shapes of all tensors of the checkpoint, and what the plugin needs. mode: how
    running requests are treated, as in `pause_generation`; in a pause, its mode counts. Nothing
    that was computed before is used any more. Raises RequestError if they are not the weights of
    such a checkpoint. The weights are then those before, or, if a transfer fails after its
    beginning, those of the last checkpoint that was read."""

    path: str | None = None
    mode: PauseMode = "abort"
    update_info: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if (self.path is None) == (self.update_info is None):
            raise RequestError(
                "update_weights takes the path of a checkpoint, or the update_info of a trainer",
                parameter="update_info",
            )


class SaveShardedState(Action[None], tag="save_sharded_state"):
    """Write the weights to a folder on the engine's machine, which is new or empty, with files for
    each rank. `load_format="sharded_state"` reads it with ranks that divide the model alike, and
    each rank then reads only its own files. pattern: their name, with {rank} and {part}; None =
    "model-rank-{rank}-part-{part}.safetensors". max_size: the most bytes of tensors in a file; None
    = one file for each rank. The checkpoint is read again for this. Raises RequestError if the
    folder cannot be written."""

    path: str
    pattern: str | None = None
    max_size: int | None = None

    def __post_init__(self) -> None:
        if self.max_size is not None and self.max_size < 1:
            raise RequestError(
                f"max_size must be at least 1 byte, got {self.max_size!r}", parameter="max_size"
            )


class Pause(Action[None], tag="pause"):
    """Stop computing. Requests that arrive wait. mode "abort": running requests end with finish
    reason "abort"; "wait": they run to their end; "keep": they go on after the pause. clear_cache:
    also forget the prefix cache; kept requests compute their tokens again. Raises RequestError if
    the pause is ended before the engine has stopped."""

    mode: PauseMode = "abort"
    clear_cache: bool = True

    def __post_init__(self) -> None:
        check_mode(self.mode)


class Resume(Action[None], tag="resume"):
    """End a pause. Raises RequestError while the engine sleeps."""


class IsPaused(Action[bool], tag="is_paused"):
    """Return whether the engine is paused or sleeps."""


class Sleep(Action[None], tag="sleep"):
    """Pause as `pause_generation` does, and release memory. level 0: none; 1: the KV cache, and the
    weights after they were saved outside of it; 2: both, and the weights are read from the
    checkpoint again. Levels 1 and 2 need `enable_sleep_mode`, else RequestError. Raises ConfigError
    if the platform cannot release memory or there is no room to save the weights."""

    level: int = 1
    mode: PauseMode = "abort"

    def __post_init__(self) -> None:
        if self.level not in (0, 1, 2):
            raise RequestError(f"level must be 0, 1 or 2, got {self.level!r}", parameter="level")
        check_mode(self.mode)


class WakeUp(Action[bool], tag="wake_up"):
    """Take the memory with these tags again, "weights" or "kv_cache"; None = all of it. The engine
    serves again when it has all its memory. Return whether it does."""

    tags: Sequence[str] | None = None

    def __post_init__(self) -> None:
        known = (*TAGS, "scheduling")
        if unknown := [tag for tag in self.tags or () if tag not in known]:
            raise RequestError(
                f"unknown tag {unknown[0]!r}; there are {', '.join(known)}", parameter="tags"
            )


class IsSleeping(Action[bool], tag="is_sleeping"):
    """Return whether the engine sleeps, even if only a part of its memory is missing."""


class AddLoRA(Action[bool], tag="add_lora"):
    """Read an adapter into memory, and return True. Raises RequestError if it cannot be read or
    does not fit the model, if there is no room for it, or if LoRA is off."""

    lora_request: LoRARequest


class RemoveLoRA(Action[bool], tag="remove_lora"):
    """Forget an adapter. Running requests keep it until they end. Return False if none with this id
    is in memory."""

    lora_id: int


class PinLoRA(Action[bool], tag="pin_lora"):
    """Keep an adapter in memory until it is removed, and return True. Raises RequestError if it is
    not in memory, or if as many adapters as there are slots are pinned."""

    lora_id: int


class ListLoRAs(Action[set[int]], tag="list_loras"):
    """Return the ids of the adapters in memory."""


class ScaleElasticEP(Action[None], tag="scale_elastic_ep"):
    """Change the number of engines (`enable_elastic_ep`). Engines that go end their requests first.
    If that takes more than `drain_timeout` seconds, raises TookTooLong and changes nothing.
    Engines that share out experts end all requests and start again; requests are refused
    meanwhile."""

    new_data_parallel_size: int
    drain_timeout: float = 300

    def __post_init__(self) -> None:
        for name in ("new_data_parallel_size", "drain_timeout"):
            if getattr(self, name) <= 0:
                raise RequestError(f"{name} must be positive", parameter=name)


class IsScalingElasticEP(Action[bool], tag="is_scaling_elastic_ep"):
    """Return whether the number of engines is being changed."""


AnyAction = (
    Stats
    | Decisions
    | ResetPrefixCache
    | StartProfile
    | StopProfile
    | CollectiveRpc
    | InitWeightTransfer
    | UpdateWeights
    | SaveShardedState
    | Pause
    | Resume
    | IsPaused
    | Sleep
    | WakeUp
    | IsSleeping
    | AddLoRA
    | RemoveLoRA
    | PinLoRA
    | ListLoRAs
    | ScaleElasticEP
    | IsScalingElasticEP
)


def check_mode(mode: str) -> None:
    if mode not in get_args(PauseMode):
        known = ", ".join(get_args(PauseMode))
        raise RequestError(f"mode must be one of {known}, got {mode!r}", parameter="mode")


ACTIONS: Mapping[str, type[Action[Any]]] = {
    str(action.__struct_config__.tag): action for action in get_args(AnyAction)
}
"""Tag → action."""


def action_of(tag: str, arguments: Mapping[str, Any]) -> Action[Any]:
    """Return the action with this tag. Raises RequestError if there is none, or if it does not take
    these arguments."""
    if tag not in ACTIONS:
        raise RequestError(
            f"unknown action {tag!r}; there are {', '.join(ACTIONS)}", parameter="action"
        )
    try:
        return ACTIONS[tag](**arguments)
    except TypeError as error:
        raise RequestError(f"{tag}: {error}") from error


def check_types(action: Action[Any]) -> None:
    """Raise RequestError unless the action consists of plain values of the right types, as it must
    to be sent to another process."""
    try:
        msgspec.convert(msgspec.to_builtins(action), type(action))
    except (TypeError, msgspec.ValidationError) as error:
        raise RequestError(f"{action.__struct_config__.tag}: {error}") from error


def answer_of(action: Action[R], value: Any) -> R:
    """Return the answer to an action, which was received as plain values, in its type."""
    (kind,) = get_args(type(action).__orig_bases__[0])  # type: ignore[attr-defined]
    return msgspec.convert(value, kind)
