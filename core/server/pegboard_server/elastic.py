"""Engines whose number changes while they serve (`--enable-elastic-ep`).

Engines with all experts are added and removed one by one, and the others go on. Engines that share
out experts end, and as many as are wanted start again, because each then holds other experts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from pegboard.engine.actions import (
    Action,
    Decisions,
    IsPaused,
    IsScalingElasticEP,
    IsSleeping,
    ListLoRAs,
    ScaleElasticEP,
    Stats,
    UpdateWeights,
)
from pegboard.engine.boundary.client import EngineProcess
from pegboard.engine.boundary.engines import Engines, OtherHosts
from pegboard.engine.boundary.messages import (
    Add,
    Control,
    ControlReply,
    Dead,
    Failure,
    FromEngine,
    Ready,
    Rejected,
    Scaled,
    Stop,
    ToEngine,
)
from pegboard.errors import EngineDeadError, Overloaded, RequestError, TookTooLong
from pegboard.log import get_logger

if TYPE_CHECKING:
    from pegboard.plan.engine_plan import EnginePlan

log = get_logger(__name__)

BUSY = Overloaded("The model is currently scaling. Please try again later.")
"""The message is vLLM's."""

HARMLESS = (Stats, Decisions, IsPaused, IsSleeping, ListLoRAs)
"""Actions that are carried out while engines are added or removed."""

LOOK_S = 0.02
"""Seconds between two looks whether requests and actions have ended."""


class ElasticEngines(Engines):
    """make: starts the process of an engine. If there are other hosts, new engines start there."""

    def __init__(
        self,
        numbers: range,
        make: Callable[..., EngineProcess] = EngineProcess,
        hosts: OtherHosts | None = None,
    ) -> None:
        super().__init__(numbers, make, hosts)
        self._make = make
        self._scaling: asyncio.Task[None] | None = None
        self._is_restarting = False
        self._weights: UpdateWeights | None = None
        self._updates: dict[int, UpdateWeights] = {}
        self._coming: dict[int, asyncio.Future[None]] = {}
        self._new: list[EngineProcess] = []
        self._ids = count(-1, -1)
        self._replies: dict[int, asyncio.Future[Any]] = {}

    def start(self, plan: "EnginePlan", *, wants_samples: bool = False) -> None:
        self._plan = plan
        super().start(plan, wants_samples=wants_samples)

    def attach(
        self, on_message: Callable[[FromEngine], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        super().attach(partial(self._pass_on, on_message), on_death)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Add) and (refusal := self._refusal(message.engine)) is not None:
            self._on_message(Rejected(message.request.request_id, Failure.of(refusal)))
        elif isinstance(message, Control) and (
            self._is_restarting or not isinstance(message.action, HARMLESS)
        ):
            self._control(message)
        else:
            super().send(message)

    def stop(self) -> None:
        """As `Engines.stop`. Engines that are being added end too."""
        if self._scaling is not None:
            self._scaling.cancel()
        self.parts.extend(self._new)
        super().stop()

    def _refusal(self, engine: int | None) -> RequestError | None:
        """Return why a request cannot be added. engine: the one that it asks for."""
        if self._is_restarting:
            return BUSY
        if engine is None or engine in self._numbers[: self._balance.num_open]:
            return None
        return RequestError(
            f"data_parallel_rank is {engine}, and this engine has gone",
            parameter="data_parallel_rank",
        )

    def _control(self, message: Control) -> None:
        action = message.action
        reply = partial(ControlReply, message.call_id)
        if isinstance(action, IsScalingElasticEP):
            self._on_message(reply(self._scaling is not None))
        elif self._scaling is not None:
            self._on_message(reply(failure=Failure.of(BUSY)))
        elif isinstance(action, ScaleElasticEP):
            self._scaling = asyncio.get_running_loop().create_task(self._carry_out(action, reply))
        else:
            if isinstance(action, UpdateWeights):
                self._updates[message.call_id] = action
            super().send(message)

    def _receive(self, index: int, message: FromEngine) -> None:
        if isinstance(message, ControlReply) and message.call_id < 0:
            message.settle(self._replies.pop(message.call_id))
        elif index in self._coming and isinstance(message, Ready):
            self._ready[index] = message
            self._coming[index].set_result(None)
        elif index in self._coming and isinstance(message, Dead):
            self._coming[index].set_exception(self._named(index, message.failure).error())
        else:
            super()._receive(index, message)

    def _pass_on(self, on_message: Callable[[FromEngine], None], message: FromEngine) -> None:
        """Pass on a message, and remember weights that all engines have taken."""
        if isinstance(message, ControlReply):
            update = self._updates.pop(message.call_id, None)
            if update is not None and message.failure is None:
                self._weights = update
        on_message(message)

    def _died(self, index: int, error: EngineDeadError) -> None:
        coming = self._coming.get(index)
        if coming is None or coming.done():
            super()._died(index, error)
        else:
            coming.set_exception(error)

    # --- scaling ----------------------------------------------------------------------------------

    async def _carry_out(self, action: ScaleElasticEP, reply: Callable[..., ControlReply]) -> None:
        failure = None
        try:
            await self._scale(action.new_data_parallel_size, action.drain_timeout)
        except Exception as error:  # noqa: BLE001 - the answer to the caller
            log.error("the number of engines did not change: %s", error)
            failure = Failure.of(error)
        self._scaling = None
        self._on_message(reply(failure=failure))

    async def _scale(self, size: int, drain_timeout: float) -> None:
        before = len(self.parts)
        if size == before:
            return
        log.info("scaling from %d to %d engines", before, size)
        await self._quiet()
        if any(await self._ask(self.parts, IsPaused())):
            raise RequestError("the engines are paused or sleep; resume them, then scale")
        shares = self._plan.settings.engine.enable_expert_parallel
        starts_some = shares or size > before
        if starts_some and self._weights is not None and self._weights.path is None:
            raise RequestError(
                "a trainer has sent the weights, which new engines would not get; let it save "
                "them, and call update_weights with the path"
            )
        if shares:
            await self._restart(size, drain_timeout)
        elif size > before:
            await self._add(size)
        else:
            await self._remove(size, drain_timeout)
        self._numbers = range(self._numbers.start, self._numbers.start + size)
        length = min(ready.max_model_len for ready in self._ready.values())
        self._on_message(Scaled(size, [str(part.folder) for part in self.parts], length))
        log.info("scaled to %d engines", size)

    async def _add(self, size: int) -> None:
        """Start more engines. The others go on."""
        new = await self._started(range(len(self.parts), size))
        await self._quiet()
        self.parts.extend(new)
        self._new.clear()
        self._balance.resize(size)

    async def _remove(self, size: int, drain_timeout: float) -> None:
        """End the last engines when their requests have ended."""
        await self._drain(size, drain_timeout)
        await self._quiet()
        leaving = self.parts[size:]
        del self.parts[size:]
        self._balance.resize(size)
        for index in range(size, size + len(leaving)):
            del self._ready[index]
        await _end(leaving)

    async def _restart(self, size: int, drain_timeout: float) -> None:
        """End all engines when their requests have ended, and start `size`. Requests are refused
        meanwhile. If the new engines do not start, the server has none."""
        self._is_restarting = True
        try:
            await self._drain(0, drain_timeout)
            await self._quiet()
            await _end(self.parts)
            self._ready.clear()
            self.parts.clear()
            try:
                new = await self._started(range(size))
            except Exception as error:
                super()._died(0, EngineDeadError(f"it did not start again: {error}"))
                raise
            self.parts.extend(new)
            self._new.clear()
            self._balance.resize(size)
        finally:
            self._is_restarting = False

    async def _drain(self, size: int, drain_timeout: float) -> None:
        """Send requests only to the first `size` engines, and wait until the others have none.
        Raises TookTooLong, and all get requests again."""
        balance = self._balance
        balance.num_open = size
        try:
            async with asyncio.timeout(drain_timeout):
                while any(balance.loads[size:]):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            balance.num_open = len(balance.loads)
            raise TookTooLong(
                f"Scale failed due to request drain timeout after {drain_timeout:g} seconds"
            ) from None

    async def _quiet(self) -> None:
        """Wait until all actions are answered."""
        while self._asked:
            await asyncio.sleep(LOOK_S)

    async def _started(self, indices: range) -> Sequence[EngineProcess]:
        """Return new engines, when all are ready and have the weights of the others. They are in
        `_new` until somebody takes them. Raises what one of them raises at its start; they have
        ended then."""
        self._new = new = []
        loop = asyncio.get_running_loop()
        try:
            for index in indices:
                new.append(self._engine(self._numbers.start + index))
                self._coming[index] = loop.create_future()
            for index, part in zip(indices, new, strict=True):
                part.attach(partial(self._receive, index), partial(self._died, index))
            plan = self._plan.of_engines(indices.stop)
            num_local = indices.stop if self._hosts is None else self._num_local
            self._start(plan, dict(zip(indices, new, strict=True)), num_local)
            await asyncio.gather(*self._coming.values())
            if self._weights is not None:
                await self._ask(new, self._weights)
        except Exception:
            await _end(new)
            for index in indices:
                self._ready.pop(index, None)
            self._new = []
            raise
        finally:
            self._coming.clear()
        return new

    def _engine(self, number: int) -> EngineProcess:
        """Start an engine on another host, unless it is one of those that run here."""
        if self._hosts is None or number < self._num_local:
            return self._make(role=f"engine {number}")
        engine: EngineProcess = self._hosts.add(number)
        return engine

    async def _ask(self, parts: Sequence[EngineProcess], action: Action[Any]) -> list[Any]:
        """Return what each engine answers."""
        loop = asyncio.get_running_loop()
        replies = {next(self._ids): loop.create_future() for _ in parts}
        self._replies.update(replies)
        for call_id, part in zip(replies, parts, strict=True):
            part.send(Control(call_id, action))  # type: ignore[arg-type]
        return await asyncio.gather(*replies.values())


async def _end(parts: Sequence[EngineProcess]) -> None:
    """End engines at the same time."""
    for part in parts:
        part.detach()
        part.send(Stop())
    await asyncio.gather(*(asyncio.to_thread(part.stop) for part in parts))
