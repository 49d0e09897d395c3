"""Several engine processes as one. `AsyncLLM` uses them like an `EngineProcess`.

A request goes to one of them (see `Balance`). An action goes to all, and their answers become one.
If an engine dies, all count as dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.config.data_parallel import engine_numbers, engines_here
from pegboard.engine.actions import (
    Action,
    CollectiveRpc,
    IsPaused,
    IsSleeping,
    ListLoRAs,
    Stats,
)
from pegboard.engine.boundary.balance import Balance
from pegboard.engine.boundary.client import EngineProcess
from pegboard.engine.boundary.messages import (
    Abort,
    Add,
    Control,
    ControlReply,
    Dead,
    Failure,
    FromEngine,
    Ready,
    Rejected,
    StepDeltas,
    Stop,
    ToEngine,
    Wake,
    decode_to_engine,
)
from pegboard.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from pegboard.config.schema import EngineConfig
    from pegboard.plan.engine_plan import EnginePlan


def start_processes(
    config: "EngineConfig", make: Callable[..., EngineProcess] = EngineProcess
) -> "EngineProcess | Engines":
    """Start the engine processes with `make(role=…)`. Raises ConfigError, also for engines that
    only a server can have."""
    numbers = engine_numbers(config)
    if len(engines_here(config)) < len(numbers) or config.enable_elastic_ep:
        raise ConfigError(
            "only pegboard serve has engines on other hosts (data_parallel_size_local) or changes "
            "their number (enable_elastic_ep); remove these settings"
        )
    return make() if len(numbers) == 1 else Engines(numbers, make)


class OtherHosts(Protocol):
    """The hosts of engines that do not run here. engines: by number; each has the methods of an
    `EngineProcess`. meeting: the address where engines meet that share out experts."""

    meeting: str

    @property
    def engines(self) -> Mapping[int, Any]: ...

    def add(self, number: int) -> Any:
        """Start one more engine somewhere, and return it."""

    def attach(self) -> None:
        """Take messages on the running event loop."""

    def detach(self) -> None: ...

    def stop(self, *, in_order: bool) -> None:
        """Let all hosts end, and wait for them. in_order: no engine has died."""


class Engines:
    """numbers: those of the engines on this host. hosts: the other ones. parts: all, in the order
    of their numbers. folder: of the first one."""

    def __init__(
        self,
        numbers: range,
        make: Callable[..., EngineProcess] = EngineProcess,
        hosts: OtherHosts | None = None,
    ) -> None:
        self.parts: list[EngineProcess | Any] = []
        self._hosts = hosts
        self._num_local = len(numbers)
        self._numbers = numbers
        if hosts is not None:
            self._numbers = range(numbers.start, numbers.stop + len(hosts.engines))
        self._balance = Balance(len(self._numbers))
        self._ready: dict[int, Ready] = {}
        self._asked: dict[int, tuple[Action[Any], dict[int, ControlReply]]] = {}
        self._in_lockstep = False
        self._is_over = False
        try:
            for number in numbers:
                self.parts.append(make(role=f"engine {number}"))
        except BaseException:
            self.stop()
            raise
        if hosts is not None:
            self.parts.extend(hosts.engines.values())
        self.folder = self.parts[0].folder

    def start(self, plan: "EnginePlan", *, wants_samples: bool = False) -> None:
        """Send each engine the plan with its number. It also has a seed of its own, so that the
        same prompt gets different answers from two engines, as it does from one. Engines that share
        out experts meet in the folder of the first one, or on a port of this host."""
        self._wants_samples = wants_samples
        self._start(plan, dict(enumerate(self.parts)), self._num_local)

    def _start(self, plan: "EnginePlan", parts: Mapping[int, Any], num_local: int) -> None:
        """parts: the engines to start, by their place. num_local: how many run on this host
        then."""
        settings = plan.settings
        self._in_lockstep = settings.engine.expert_engines > 1
        if self._in_lockstep:
            here = (parts[0].folder / "meet").as_uri()
            plan = replace(plan, meeting=here if self._hosts is None else self._hosts.meeting)
        for index, part in parts.items():
            number = self._numbers.start + index
            placed = settings.with_engine(
                "data parallel",
                data_parallel_rank=number,
                data_parallel_start_rank=self._numbers.start,
                data_parallel_size_local=num_local,
                seed=settings.engine.seed + number,
            )
            part.start(replace(plan, settings=placed), wants_samples=self._wants_samples)

    def attach(
        self, on_message: Callable[[FromEngine], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        """As `EngineProcess.attach`."""
        self._on_message = on_message
        self._on_death = on_death
        for index, part in enumerate(self.parts):
            part.attach(partial(self._receive, index), partial(self._died, index))
        if self._hosts is not None:
            self._hosts.attach()

    @property
    def stalled(self) -> str:
        """Why an engine does not answer at present, or ""."""
        named = enumerate(self.parts, self._numbers.start)
        return next(
            (f"engine {number}: {each.stalled}" for number, each in named if each.stalled), ""
        )

    def send(self, message: ToEngine) -> None:
        """Send a message to the engines that it concerns, without blocking."""
        if isinstance(message, Add):
            wanted = message.engine
            engine = None if wanted is None else self._numbers.index(wanted)
            chosen = self._balance.add(message.request, engine)
            self.parts[chosen].send(message)
            if self._in_lockstep:
                for part in (*self.parts[:chosen], *self.parts[chosen + 1 :]):
                    part.send(Wake())
        elif isinstance(message, Abort):
            self._abort(message)
        else:
            if isinstance(message, Control):
                self._asked[message.call_id] = message.action, {}
            for part in self.parts:
                part.send(message)

    def send_encoded(self, data: bytes) -> None:
        """Send a message that is already encoded."""
        self.send(decode_to_engine(data))

    def detach(self) -> None:
        """As `EngineProcess.detach`."""
        for part in self.parts:
            part.detach()
        if self._hosts is not None:
            self._hosts.detach()

    def _abort(self, message: Abort) -> None:
        ids: dict[int, list[str]] = {}
        for name in message.ids:
            if (engine := self._balance.engine_of(name)) is not None:
                ids.setdefault(engine, []).append(name)
        for engine, names in ids.items():
            self.parts[engine].send(Abort(names, message.reason))

    def stop(self) -> None:
        """End all processes at the same time. Blocks until they have ended. If an engine has died,
        those that share out experts with it may wait for it, and do not see a message."""
        has_died = self._is_over
        is_stuck = has_died and self._in_lockstep
        self._is_over = True
        for part in self.parts:
            if is_stuck:
                part.kill()
            else:
                part.send(Stop())
        if self._hosts is not None:
            self._hosts.stop(in_order=not has_died)
        for part in self.parts:
            part.stop()

    def _receive(self, index: int, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self._ready[index] = message
            if len(self._ready) == len(self.parts):
                self._on_message(merged_ready(self._in_order(self._ready)))
        elif isinstance(message, ControlReply):
            self._answer(index, message)
        elif isinstance(message, Dead):
            if not self._is_over:
                self._is_over = True
                self._on_message(Dead(self._named(index, message.failure), message.is_start))
        else:
            if isinstance(message, StepDeltas):
                self._balance.feed(message.deltas)
            elif isinstance(message, Rejected):
                self._balance.remove(message.request_id)
            self._on_message(message)

    def _answer(self, index: int, reply: ControlReply) -> None:
        action, replies = self._asked[reply.call_id]
        replies[index] = reply
        if len(replies) < len(self.parts):
            return
        del self._asked[reply.call_id]
        failed = [place for place, each in sorted(replies.items()) if each.failure is not None]
        if failed:
            failure = replies[failed[0]].failure
            assert failure is not None
            if len(failed) < len(self.parts):
                failure = self._named(failed[0], failure)
            self._on_message(ControlReply(reply.call_id, failure=failure))
            return
        answers = [each.result for each in self._in_order(replies)]
        self._on_message(ControlReply(reply.call_id, merged(action, answers)))

    def _died(self, index: int, error: EngineDeadError) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_death(EngineDeadError(f"engine {self._numbers.start + index}: {error}"))

    def _named(self, index: int, failure: Failure) -> Failure:
        message = f"engine {self._numbers.start + index}: {failure.message}"
        return Failure(failure.type, message, failure.carried)

    def _in_order(self, by_index: "dict[int, Any]") -> list[Any]:
        return [by_index[index] for index in range(len(self.parts))]


def merged_ready(messages: Sequence[Ready]) -> Ready:
    """Return one `Ready` for all engines. Their shortest `max_model_len` holds."""
    info = merged(Stats(), [message.info for message in messages])
    lengths = [message.max_model_len for message in messages]
    return Ready(info, messages[0].metrics, min(lengths))


def merged(action: Action[Any], answers: Sequence[Any]) -> Any:
    """Return one answer to an action that all engines have answered. Equal answers are one. Lists
    of results are joined in the order of the engines, numbers are added up, and an engine that is
    paused or has not done it counts for all."""
    if isinstance(action, CollectiveRpc):
        return [result for results in answers for result in results]
    if isinstance(action, Stats):
        return _summed(answers)
    if isinstance(action, ListLoRAs):
        return sorted(set().union(*answers))
    if isinstance(action, IsPaused | IsSleeping):
        return any(answers)
    return next((answer for answer in answers if not answer), answers[0])


def _summed(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up numbers by key. Fractions ("…_perc") become their mean, and mappings are joined."""
    total: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            share = value / len(parts) if key.endswith("_perc") else value
            if isinstance(value, dict):
                total[key] = {**total.get(key, {}), **value}
            else:
                total[key] = total.get(key, 0) + share
    return total
