"""The methods of `AsyncLLM`, `LLMEngine` and `LLM` that ask a running engine for something besides
requests. The names are vLLM's. Each method is declared once, as an action of `engine/actions.py`,
and made here for both worlds."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from pegboard.engine.actions import (
    Action,
    AddLoRA,
    CollectiveRpc,
    InitWeightTransfer,
    IsPaused,
    IsSleeping,
    ListLoRAs,
    Pause,
    PauseMode,
    PinLoRA,
    RemoveLoRA,
    ResetPrefixCache,
    Resume,
    SaveShardedState,
    ScaleElasticEP,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
)
from pegboard.errors import RequestError, brief

P = ParamSpec("P")
R = TypeVar("R")


def online(
    action: Callable[P, Action[R]],
) -> "Callable[Concatenate[AsyncControls, P], Coroutine[Any, Any, R]]":
    """Return the coroutine method that asks for this action."""

    async def method(self: AsyncControls, /, *args: P.args, **kwargs: P.kwargs) -> R:
        answer: R = await self._ask(action(*args, **kwargs))
        return answer

    return _documented(method, action)


def offline(action: Callable[P, Action[R]]) -> "Callable[Concatenate[SyncControls, P], R]":
    """Return the method that asks for this action and waits."""

    def method(self: SyncControls, /, *args: P.args, **kwargs: P.kwargs) -> R:
        answer: R = self._ask(action(*args, **kwargs))
        return answer

    return _documented(method, action)


Method = TypeVar("Method", bound=Callable[..., Any])


def _documented(method: Method, action: Callable[..., object]) -> Method:
    parameters = inspect.signature(action).parameters.values()
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__doc__ = action.__doc__
    method.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return method


def _values(request: Any, name: str) -> Mapping[str, Any]:
    """Return the mapping `name` of a request, which is a mapping or an object. Raises
    RequestError."""
    values = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    if not isinstance(values, Mapping):
        raise RequestError(f"expected {{{name!r}: {{…}}}}, got {brief(request)}", parameter=name)
    return dict(values)


def _trainer(request: Any) -> InitWeightTransfer:
    return InitWeightTransfer(_values(request, "init_info"))


_trainer.__doc__ = f"""{InitWeightTransfer.__doc__}

    request: {{"init_info": …}}, or an object with this attribute."""


def _new_weights(request: Any, mode: PauseMode = "abort") -> UpdateWeights:
    if isinstance(request, str | Path):
        return UpdateWeights(str(request), mode)
    info = _values(request, "update_info")
    return (
        UpdateWeights(info["path"], mode)
        if [*info] == ["path"]
        else UpdateWeights(None, mode, info)
    )


_new_weights.__doc__ = f"""{UpdateWeights.__doc__}

    request: a path, or {{"update_info": …}}, or an object with this attribute."""


def _share_files(
    path: str | Path, pattern: str | None = None, max_size: int | None = None
) -> SaveShardedState:
    return SaveShardedState(str(path), pattern, max_size)


_share_files.__doc__ = SaveShardedState.__doc__


class AsyncControls:
    """ask: sends an action to the engine and returns its answer."""

    def __init__(self, ask: Callable[[Action[Any]], Coroutine[Any, Any, Any]]) -> None:
        self._ask = ask

    add_lora = online(AddLoRA)
    init_weight_transfer_engine = online(_trainer)
    is_paused = online(IsPaused)
    is_sleeping = online(IsSleeping)
    list_loras = online(ListLoRAs)
    pause_generation = online(Pause)
    pin_lora = online(PinLoRA)
    remove_lora = online(RemoveLoRA)
    reset_prefix_cache = online(ResetPrefixCache)
    resume_generation = online(Resume)
    save_sharded_state = online(_share_files)
    scale_elastic_ep = online(ScaleElasticEP)
    sleep = online(Sleep)
    start_profile = online(StartProfile)
    stop_profile = online(StopProfile)
    update_weights = online(_new_weights)
    wake_up = online(WakeUp)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker extension (`worker_extension_cls`) between two steps, and
        return the results in rank order. Arguments and results are plain values: numbers, strings,
        bytes, lists, dicts. After `timeout` seconds, raises TimeoutError; the workers run on.
        Raises RequestError if there is no such method, and PegboardError if it fails."""
        if not isinstance(method, str):
            raise RequestError(
                "functions are not sent to the engine process; put a method into "
                "worker_extension_cls, and give its name",
                parameter="method",
            )
        call = CollectiveRpc(method, list(args), dict(kwargs or {}))
        results: list[Any] = await asyncio.wait_for(self._ask(call), timeout)
        return results


class SyncControls:
    """ask: carries out an action and returns its answer."""

    def __init__(self, ask: Callable[[Action[Any]], Any]) -> None:
        self._ask = ask

    add_lora = offline(AddLoRA)
    init_weight_transfer_engine = offline(_trainer)
    is_sleeping = offline(IsSleeping)
    list_loras = offline(ListLoRAs)
    pin_lora = offline(PinLoRA)
    remove_lora = offline(RemoveLoRA)
    reset_prefix_cache = offline(ResetPrefixCache)
    save_sharded_state = offline(_share_files)
    sleep = offline(Sleep)
    start_profile = offline(StartProfile)
    stop_profile = offline(StopProfile)
    update_weights = offline(_new_weights)
    wake_up = offline(WakeUp)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker extension (`worker_extension_cls`), or a function that takes
        the worker, between two steps. Return the results in rank order. The call cannot be
        interrupted: if it took more than `timeout` seconds, raises TimeoutError when it has ended.
        Raises RequestError if there is no such method, and what the method raises."""
        started = time.monotonic()
        results = self._ask(CollectiveRpc(method, args, dict(kwargs or {})))
        if timeout is not None and (took := time.monotonic() - started) > timeout:
            raise TimeoutError(
                f"collective_rpc took {took:.1f} s, timeout is {timeout} s; the call has ended"
            )
        return list(results)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model of each rank (see `pegboard.layers`), and return the
        results in rank order."""
        return self.collective_rpc(lambda worker: func(worker.model))
