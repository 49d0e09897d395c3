"""What crosses the boundary between the API process (A) and the engine process (E): msgpack, one message per frame.

    A → E   Start, Add, Abort, Control, Stop
    E → A   Ready, StepDeltas, Measured, Rejected, ControlReply, Dead

E sends one `StepDeltas` per step with the deltas of all requests, so A wakes once per step. A `Measured` goes to every API
process. It precedes the deltas of its step and covers all steps since the previous one (see `SampleRelay` in
`engine/metrics/sinks.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pegboard import errors
from pegboard.data.request import EngineRequest, RequestDelta
from pegboard.errors import PegboardError
from pegboard.interfaces.metrics import Metric, Sample


class Start(msgspec.Struct, tag="start"):
    """The first message. plan: the pickled `EnginePlan`; it arrives over a socket only this user can open. wants_samples: A has
    metrics sinks, so E sends `Measured`."""

    plan: bytes
    wants_samples: bool = False


class Add(msgspec.Struct, tag="add"):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort"):
    """ids: request ids, or keys of single completions (see `pegboard.data.request.Request.key`). reason: "stop" for completions
    in whose text A has found a stop string."""

    ids: list[str]
    reason: Literal["abort", "stop"] = "abort"


class Control(msgspec.Struct, tag="control"):
    """An action of `Engine.control`; `call_id` comes back in the reply."""

    call_id: int
    action: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, tag="stop"):
    """Exit now and drop all running requests."""


class Failure(msgspec.Struct):
    """An exception as values: the name of its class in `pegboard.errors`, and the attributes that it carries."""

    type: str
    message: str
    carried: dict[str, Any] = {}

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """What to send for `error`. Foreign exceptions travel as PegboardError with their type in the message."""
        if not isinstance(error, PegboardError):
            return cls("PegboardError", f"{type(error).__name__}: {error}")
        name = next(base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base)
        carried = {key: value for key, value in vars(error).items() if key in ("parameter", "plugin", "retry_after_s")}
        return cls(name, str(error), carried)

    def error(self) -> PegboardError:
        """The exception again, to be raised on the other side."""
        error: PegboardError = getattr(errors, self.type)(self.message)
        vars(error).update(self.carried)
        return error


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded. info: plain values of the engine (`Engine.stats()` at start). metrics: what samples will hold."""

    info: dict[str, Any] = {}
    metrics: list[Metric] = []


class StepDeltas(msgspec.Struct, tag="deltas"):
    deltas: list[RequestDelta]


class Measured(msgspec.Struct, tag="measured"):
    """What the engine has measured since the last `Measured`."""

    sample: Sample


class Rejected(msgspec.Struct, tag="rejected"):
    """The engine refused a request."""

    request_id: str
    failure: Failure


class ControlReply(msgspec.Struct, tag="reply"):
    call_id: int
    result: Any = None
    failure: Failure | None = None


class Dead(msgspec.Struct, tag="dead"):
    """The last message of an engine that failed. is_start: it never became ready."""

    failure: Failure
    is_start: bool = False


ToEngine = Start | Add | Abort | Control | Stop
FromEngine = Ready | StepDeltas | Measured | Rejected | ControlReply | Dead

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
