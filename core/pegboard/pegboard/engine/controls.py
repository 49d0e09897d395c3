"""Carries out actions (see `engine/actions.py`) between two steps."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.engine.actions import (
    TAGS,
    Action,
    AddLoRA,
    CollectiveRpc,
    Decisions,
    InitWeightTransfer,
    IsPaused,
    IsScalingElasticEP,
    IsSleeping,
    ListLoRAs,
    Pause,
    PauseMode,
    PinLoRA,
    R,
    RemoveLoRA,
    ResetPrefixCache,
    Resume,
    SaveShardedState,
    ScaleElasticEP,
    Sleep,
    StartProfile,
    Stats,
    StopProfile,
    UpdateWeights,
    WakeUp,
)
from pegboard.engine.life import Life
from pegboard.engine.live_requests import LiveRequests
from pegboard.engine.lockstep import Alone
from pegboard.engine.loras import LoRASlots
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.scheduler import Scheduler
from pegboard.engine.steps import Steps
from pegboard.engine.weight_updates import WeightUpdates
from pegboard.errors import EngineDeadError, ModelError, RequestError
from pegboard.interfaces.executor import Executor

if TYPE_CHECKING:
    from pegboard.interfaces.weight_loader import Checkpoint


def no_checkpoint(path: str) -> "Checkpoint":
    raise ModelError(f"this engine was not built from a checkpoint, so {path} cannot replace it")


Slow = Generator[None, None, R]
"""An action that takes more than a step. It yields to be asked again after the next step."""


class Controls:
    """stats, decisions: answer the actions of these names. describe: returns the checkpoint at a
    path, or raises ModelError. can_sleep: `enable_sleep_mode` is set."""

    def __init__(
        self,
        executor: Executor,
        life: Life,
        live: LiveRequests,
        scheduler: Scheduler,
        steps: Steps,
        loras: LoRASlots | None,
        metrics: StepMetrics,
        lockstep: Alone,
        *,
        stats: Callable[[], dict[str, Any]],
        decisions: Callable[[], list[dict[str, Any]]],
        describe: Callable[[str], "Checkpoint"],
        can_sleep: bool,
    ) -> None:
        self._slots = loras
        self._executor = executor
        self._life = life
        self._live = live
        self._scheduler = scheduler
        self._steps = steps
        self._metrics = metrics
        self._lockstep = lockstep
        self._updates = WeightUpdates(executor, live, steps, describe)
        self._can_sleep = can_sleep
        self._mode: PauseMode | None = None  # of the current pause; None = the engine serves
        self._is_sleeping = False
        self._asleep: list[str] = []  # the tags of the released memory
        self._pending: list[tuple[Slow[Any], Future[Any]]] = []
        self._handlers: dict[type[Action[Any]], Callable[[Any], Any]] = {
            Stats: lambda action: stats(),
            Decisions: lambda action: decisions(),
            ResetPrefixCache: lambda action: self._reset(recompute=action.reset_running_requests),
            StartProfile: lambda action: self._profile(action.path),
            StopProfile: lambda action: self._profile(None),
            CollectiveRpc: self._collective_rpc,
            InitWeightTransfer: self._updates.connect,
            UpdateWeights: self._update_weights,
            SaveShardedState: self._save,
            Pause: lambda action: self._pause(action.mode, action.clear_cache),
            Resume: lambda action: self._resume(),
            IsPaused: lambda action: self._mode is not None,
            Sleep: self._sleep,
            WakeUp: self._wake_up,
            IsSleeping: lambda action: self._is_sleeping,
            AddLoRA: self._add_lora,
            RemoveLoRA: lambda action: self._loras().remove(action.lora_id),
            PinLoRA: lambda action: self._loras().pin(action.lora_id),
            ListLoRAs: lambda action: set(self._loras().ids()),
            ScaleElasticEP: _cannot_scale,
            IsScalingElasticEP: lambda action: False,
        }

    @property
    def is_busy(self) -> bool:
        """Whether an action waits for the next step."""
        return bool(self._pending)

    def start(self, action: Action[R]) -> "Future[R]":
        """Carry out an action. The future has its answer or its error as soon as it is done, which
        may be after some steps."""
        future: Future[R] = Future()
        try:
            answer = self._handlers[type(action)](action)
        except Exception as error:  # noqa: BLE001 - the answer to the caller; the engine goes on
            future.set_exception(error)
            return future
        if isinstance(answer, Generator):
            self._pending.append((answer, future))
            self.advance()
        else:
            future.set_result(answer)
        return future

    def advance(self) -> None:
        """Go on with the actions that wait."""
        for each in list(self._pending):
            slow, future = each
            try:
                next(slow)
                continue
            except StopIteration as end:
                self._pending.remove(each)
                future.set_result(end.value)
            except Exception as error:  # noqa: BLE001 - as in `start`
                self._pending.remove(each)
                future.set_exception(error)

    # --- pauses -----------------------------------------------------------------------------------

    def _pause(self, mode: PauseMode, clear_cache: bool) -> Slow[None]:
        """Ends when no request runs and no KV transfer is open."""
        self._mode = mode
        live = self._live
        waiting = live.waiting
        waiting.close()
        self._scheduler.pause(mode != "wait")
        if mode == "abort":
            for request in [each for each in live if each not in waiting.held]:
                live.fail(request, "abort")
        while mode == "wait" and len(live) > len(waiting.held):
            yield from self._next_step()
        self._scheduler.pause(True)
        self._steps.finish_all()
        while clear_cache and not self._reset(recompute=True):
            yield from self._next_step()

    def _next_step(self) -> Slow[None]:
        yield
        if self._mode is None:
            raise RequestError("the pause was ended before the engine had stopped")

    def _resume(self) -> None:
        if self._is_sleeping:
            raise RequestError("the engine sleeps; wake it with wake_up")
        self._mode = None
        self._scheduler.pause(False)
        self._live.waiting.open()

    def _sleep(self, action: Sleep) -> Slow[None]:
        if action.level and not self._can_sleep:
            raise RequestError(
                "the engine was started without enable_sleep_mode; only level 0 is possible",
                parameter="level",
            )
        if self._is_sleeping:
            raise RequestError("the engine sleeps already; wake it with wake_up")
        yield from self._pause(action.mode, clear_cache=action.level > 0)
        if action.level:
            try:
                self._executor.call("sleep", action.level)
            except BaseException:
                self._resume()  # the workers have all their memory
                raise
            self._asleep = list(TAGS)
        self._is_sleeping = True
        self._metrics.sleeps(action.level)

    def _wake_up(self, action: WakeUp) -> bool:
        waking = [tag for tag in self._asleep if action.tags is None or tag in action.tags]
        if waking:
            self._executor.call("wake_up", waking)
            self._asleep = [tag for tag in self._asleep if tag not in waking]
        if self._is_sleeping and not self._asleep:
            self._is_sleeping = False
            self._metrics.sleeps(None)
            self._resume()
        return self._mode is None

    # --- the prefix cache and the weights ---------------------------------------------------------

    def _reset(self, *, recompute: bool) -> bool:
        """Forget all cached blocks. recompute: first take the blocks of all requests. Return False
        if blocks are in use, by requests or by KV transfers."""
        live = self._live
        if recompute:
            self._steps.finish_all()
            with self._life.changing():
                for request in list(live.running):
                    live.preempt(request)
                while live.reclaim():
                    pass
        is_reset = live.kv.pool.reset()
        if is_reset:
            live.connectors.reset()
        return is_reset

    def _update_weights(self, action: UpdateWeights) -> Slow[None]:
        """Requests that go on compute all their tokens again."""
        if "weights" in self._asleep:
            raise RequestError('the weights are asleep; call wake_up with the tag "weights" first')
        is_own = self._mode is None
        try:
            replace_weights = self._updates.prepare(action)
            yield from self._pause(self._mode or action.mode, clear_cache=True)
            while not self._lockstep.is_quiet:  # others compute with the experts of this engine
                yield from self._next_step()
            replace_weights()
        except EngineDeadError:
            with self._life.changing():
                raise
        except BaseException:
            if is_own and self._mode is not None:
                self._resume()
            raise
        if is_own:
            self._resume()

    # --- workers ----------------------------------------------------------------------------------

    def _save(self, action: SaveShardedState) -> None:
        self._steps.finish_all()
        try:
            folder = Path(action.path).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ModelError(f"{folder} has files already; name a new folder, or an empty one")
            self._executor.call("save_sharded_state", str(folder), action.pattern, action.max_size)
        except (OSError, ModelError) as error:
            raise RequestError(str(error), parameter="path") from error

    def _profile(self, path: str | None) -> None:
        self._steps.finish_all()
        self._executor.call("profile", path)

    def _collective_rpc(self, action: CollectiveRpc) -> list[object]:
        self._steps.finish_all()
        return self._executor.call(
            "collective_rpc", action.method, tuple(action.args), dict(action.kwargs)
        )

    # --- adapters ---------------------------------------------------------------------------------

    def _add_lora(self, action: AddLoRA) -> Slow[bool]:
        lora = action.lora_request
        slots = self._loras()
        while not slots.add(lora, is_idle=not self._steps):
            lora = msgspec.structs.replace(lora, load_inplace=False)
            yield
        return True

    def _loras(self) -> LoRASlots:
        """Return the adapters, after all steps have ended. Raises RequestError if LoRA is off."""
        if self._slots is None:
            raise RequestError(
                "LoRA is off; start with enable_lora or max_loras of at least 1",
                parameter="lora_request",
            )
        self._steps.finish_all()
        return self._slots


def _cannot_scale(action: ScaleElasticEP) -> None:
    raise RequestError("the number of engines is fixed; start the server with --enable-elastic-ep")
