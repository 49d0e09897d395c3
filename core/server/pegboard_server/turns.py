"""Turns to change what all API processes of a server must know. One process at a time has the turn.
It tells the others what it has changed, and goes on when they have heard it.

    process → parent   Ask, Tell, Heard, Done
    parent → process   Given, Told, Heard

A message never overtakes another one on its way, so a process that gets the turn has heard
everything that was told before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from pegboard.data.request import LoRARequest


class Ask(msgspec.Struct, tag="ask"):
    """This process wants the turn."""


class Given(msgspec.Struct, tag="given"):
    """You have the turn."""


class Done(msgspec.Struct, tag="done"):
    """The turn is over."""


class Tell(msgspec.Struct, tag="tell"):
    """An adapter of this name is served from now on. lora: None = it is not served any more."""

    name: str
    lora: LoRARequest | None


class Told(msgspec.Struct, tag="told"):
    """What another process tells. is_news: it waits until this process has heard it."""

    change: Tell
    is_news: bool = True


class Heard(msgspec.Struct, tag="heard"):
    """To the parent: this process has heard the news. To a process: all others have heard it."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ask | Given | Done | Tell | Told | Heard).decode

OnTold = Callable[[str, LoRARequest | None], None]
"""Takes the name of an adapter, and the adapter or None, as `Tell` has them."""


class Turns(Protocol):
    """`async with turns:` waits for the turn. on_told is called with what other processes tell."""

    on_told: OnTold

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def tell(self, name: str, lora: LoRARequest | None) -> None:
        """Tell the other processes of a change, and wait until they have heard it. Called by the
        one that has the turn."""


class OwnTurns(asyncio.Lock):
    """The turns of a server with one API process."""

    on_told: OnTold

    async def tell(self, name: str, lora: LoRARequest | None) -> None:
        """Do nothing."""


class SharedTurns:
    """The turns of one of several API processes. send: sends to the parent. The waits must not be
    cancelled, because the parent counts the answers."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.on_told: OnTold = lambda name, lora: None
        self._send = send
        self._lock = asyncio.Lock()
        self._answer: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        await self._ask(Ask())

    async def __aexit__(self, *exc_info: object) -> None:
        self._send(_encode(Done()))
        self._lock.release()

    async def tell(self, name: str, lora: LoRARequest | None) -> None:
        await self._ask(Tell(name, lora))

    def receive(self, data: bytes) -> None:
        """Take a message of the parent."""
        message = _decode(data)
        if isinstance(message, Told):
            self.on_told(message.change.name, message.change.lora)
            if message.is_news:
                self._send(_encode(Heard()))
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    async def _ask(self, message: Ask | Tell) -> None:
        self._answer = asyncio.get_running_loop().create_future()
        self._send(_encode(message))
        await self._answer


class TurnQueue:
    """The parent's end. send: sends to one of the `count` processes, by its name."""

    def __init__(self, count: int, send: Callable[[bytes, bytes], None]) -> None:
        self._count = count
        self._send = send
        self._attached: set[bytes] = set()
        self._queue: deque[bytes] = deque()  # the first one has the turn
        self._changes: dict[str, Tell] = {}
        self._num_unheard = 0

    def attach(self, name: bytes) -> None:
        """Tell a new process everything that the others know."""
        self._attached.add(name)
        for change in self._changes.values():
            self._send(name, _encode(Told(change, is_news=False)))
        if len(self._attached) == self._count:
            self._changes.clear()

    def receive(self, name: bytes, data: bytes) -> None:
        """Take a message of a process."""
        message = _decode(data)
        if isinstance(message, Ask):
            self._queue.append(name)
            if len(self._queue) == 1:
                self._give()
        elif isinstance(message, Tell):
            self._spread(message)
        elif isinstance(message, Heard):
            self._num_unheard -= 1
            self._confirm()
        else:
            self._queue.popleft()
            self._give()

    def _give(self) -> None:
        if self._queue:
            self._send(self._queue[0], _encode(Given()))

    def _spread(self, change: Tell) -> None:
        if len(self._attached) < self._count:
            self._changes[change.name] = change
        others = self._attached - {self._queue[0]}
        self._num_unheard = len(others)
        for name in others:
            self._send(name, _encode(Told(change)))
        self._confirm()

    def _confirm(self) -> None:
        if not self._num_unheard:
            self._send(self._queue[0], _encode(Heard()))
