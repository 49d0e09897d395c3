"""The messages between the API process (A) and the engine process (E), encoded with msgpack, one
message per frame.

    A → E   Start, Add, Wake, Abort, Control, Stop
    E → A   Ready, StepDeltas, Measured, Rejected, ControlReply, Scaled, Dead

E sends one `StepDeltas` per step with the deltas of all requests, so A wakes once per step. A
`Measured` goes to every API process. It precedes the deltas of its step and covers all steps since
the previous one (see `SampleRelay` in `engine/metrics/sinks.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pegboard import errors
from pegboard.data.request import EngineRequest, RequestDelta
from pegboard.engine.actions import AnyAction
from pegboard.errors import PegboardError
from pegboard.interfaces.metrics import Metric, Sample

if TYPE_CHECKING:
    from asyncio import Future


class Start(msgspec.Struct, tag="start"):
    """The first message. plan: the pickled `EnginePlan`, which is safe because only this user can
    open the socket. wants_samples: A has metrics sinks, so E should send `Measured`."""

    plan: bytes
    wants_samples: bool = False


class Add(msgspec.Struct, tag="add"):
    """engine: the number of the engine that the request must go to; None = any."""

    request: EngineRequest
    engine: int | None = None


class Wake(msgspec.Struct, tag="wake"):
    """An engine with which this one shares out experts gets a request."""


class Abort(msgspec.Struct, tag="abort"):
    """ids: request ids, or keys of single completions (see `pegboard.engine.requests.Request.key`).
    reason: "stop" for completions in whose text A has found a stop string."""

    ids: list[str]
    reason: Literal["abort", "stop"] = "abort"


class Control(msgspec.Struct, tag="control"):
    """Carry out an action. The reply comes when it is done, and has the same `call_id`."""

    call_id: int
    action: AnyAction


class Stop(msgspec.Struct, tag="stop"):
    """Exit and drop all running requests."""


class Failure(msgspec.Struct):
    """An exception as plain values: the name of its class in `pegboard.errors`, and its
    attributes."""

    type: str
    message: str
    carried: dict[str, Any] = {}

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return `error` as plain values. Any exception that is not a PegboardError becomes one,
        with its type in the message."""
        if not isinstance(error, PegboardError):
            return cls("PegboardError", f"{type(error).__name__}: {error}")
        name = next(
            base.__name__
            for base in type(error).__mro__
            if getattr(errors, base.__name__, None) is base
        )
        carried = {
            key: value
            for key, value in vars(error).items()
            if key in ("parameter", "plugin", "retry_after_s")
        }
        return cls(name, str(error), carried)

    def error(self) -> PegboardError:
        """Return the exception, which the other side can raise."""
        error: PegboardError = getattr(errors, self.type)(self.message)
        vars(error).update(self.carried)
        return error


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded. info: `Engine.stats()` at start. metrics: the metrics that samples will
    contain. max_model_len: the plan's, or a smaller one that fits the memory; 0 = the plan's."""

    info: dict[str, Any] = {}
    metrics: list[Metric] = []
    max_model_len: int = 0


class StepDeltas(msgspec.Struct, tag="deltas"):
    deltas: list[RequestDelta]


class Measured(msgspec.Struct, tag="measured"):
    """The engine's measurements since the last `Measured`."""

    sample: Sample


class Rejected(msgspec.Struct, tag="rejected"):
    """The engine refused a request."""

    request_id: str
    failure: Failure


class ControlReply(msgspec.Struct, tag="reply"):
    call_id: int
    result: Any = None
    failure: Failure | None = None

    def settle(self, future: "Future[Any]") -> None:
        """Give the answer, or the error, to whoever still waits for it."""
        if future.done():
            return
        if self.failure is None:
            future.set_result(self.result)
        else:
            future.set_exception(self.failure.error())


class Scaled(msgspec.Struct, tag="scaled"):
    """The number of engines has changed. folders: theirs. max_model_len: as in `Ready`."""

    num_engines: int
    folders: list[str]
    max_model_len: int


class Dead(msgspec.Struct, tag="dead"):
    """The last message of an engine that has failed. is_start: the engine failed before it was
    ready."""

    failure: Failure
    is_start: bool = False


ToEngine = Start | Add | Wake | Abort | Control | Stop
FromEngine = Ready | StepDeltas | Measured | Rejected | ControlReply | Scaled | Dead

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
