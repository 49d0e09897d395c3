"""The engine of an `AsyncLLM`: its start, its end, and the actions that wait for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from pegboard.engine.actions import Action, R, answer_of, check_types
from pegboard.engine.boundary.messages import (
    Control,
    ControlReply,
    Dead,
    FromEngine,
    Ready,
    ToEngine,
)
from pegboard.errors import EngineDeadError, PegboardError
from pegboard.interfaces.api import Health


class EngineConnection:
    """Used on one event loop.

    engine: an `EngineProcess` or a `HubEngine`. on_message: gets `Ready` and the messages about
    requests and measurements. on_death: gets the error, once. dead: why the engine is dead; None =
    it lives.
    """

    def __init__(
        self,
        engine: Any,
        on_message: Callable[[FromEngine], None],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        self._engine = engine
        self._on_message = on_message
        self._on_death = on_death
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._ids = count()
        self._ready: asyncio.Future[None] | None = None
        self.dead: EngineDeadError | None = None
        self._is_stopped = False

    async def start(self) -> None:
        """Wait until the engine is ready. Later calls return at once. Raises the error of the
        engine's start."""
        if self._ready is None:
            self.check()
            self._ready = asyncio.get_running_loop().create_future()
            # asyncio wants it to be read
            self._ready.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._engine.attach(self._receive, self._die)
        await asyncio.shield(self._ready)

    def stop(self) -> None:
        """End the engine process. Blocks until it is gone. A second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self.dead is None:
            self._die(EngineDeadError("the engine was shut down"))
        self._engine.stop()

    def check(self) -> None:
        """Raise EngineDeadError if the engine is dead."""
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))

    @property
    def stalled(self) -> str:
        """Why the engine does not answer at present, or ""."""
        return "" if self.dead is not None else self._engine.stalled

    def send(self, message: ToEngine) -> None:
        """Send a message without blocking. Messages to a dead engine are dropped."""
        self._engine.send(message)

    async def ask(self, action: Action[R]) -> R:
        """Send an action to the engine and return its answer, when it is done. Raises RequestError
        if its arguments cannot be sent, and what the action raises."""
        check_types(action)
        await self.start()
        self.check()
        call_id = next(self._ids)
        future = self._asked[call_id] = asyncio.get_running_loop().create_future()
        self.send(Control(call_id, action))  # type: ignore[arg-type]
        try:
            return answer_of(action, await future)
        finally:
            self._asked.pop(call_id, None)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, ControlReply):
            self._answer(message)
        elif isinstance(message, Dead):
            self._fail_start(message.failure.error())
            self.dead = EngineDeadError(f"the engine did not start: {message.failure.message}")
        else:
            self._on_message(message)
            if isinstance(message, Ready) and self._ready is not None:
                self._ready.set_result(None)

    def _answer(self, reply: ControlReply) -> None:
        future = self._asked.pop(reply.call_id, None)
        if future is not None:
            reply.settle(future)

    def _die(self, error: EngineDeadError) -> None:
        self.dead = error
        self._fail_start(error)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)
        self._asked.clear()
        self._on_death(error)

    def _fail_start(self, error: PegboardError) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)


class Connected:
    """The state of an engine, as its client knows it."""

    _connection: EngineConnection

    def health(self) -> Health:
        problem = self._connection.dead or self._connection.stalled
        return Health(not problem, str(problem), bool(self._connection.stalled))

    @property
    def is_running(self) -> bool:
        return self._connection.dead is None

    @property
    def errored(self) -> bool:
        return self._connection.dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        return self._connection.dead or EngineDeadError("the engine is alive")

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead."""
        self._connection.check()
