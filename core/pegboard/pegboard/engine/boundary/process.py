"""The engine process (E): its start, its message loop, and its orderly end in every case.

The process starts before the plan is known, so the slow imports run while the parent resolves the
plan. It ends when it receives `Stop`, when its parent is gone, on SIGUSR1, or when the engine
fails. It ignores SIGTERM, which a service manager sends to all processes: the parent lets running
requests finish first, and then sends `Stop`.
"""

from __future__ import annotations

import logging
import pickle
import signal
from concurrent.futures import Future
from types import FrameType
from typing import Any

import zmq

from pegboard.engine.boundary.messages import (
    Abort,
    Add,
    Control,
    ControlReply,
    Dead,
    Failure,
    Measured,
    Ready,
    Rejected,
    Start,
    StepDeltas,
    Stop,
    Wake,
    decode_to_engine,
    encode,
)
from pegboard.engine.boundary.spawn import END_NOW, load_function, take_signals
from pegboard.engine.metrics.sinks import SampleRelay
from pegboard.errors import EngineDeadError, PegboardError, PluginFailure, RequestError
from pegboard.log import get_logger

log = get_logger(__name__)


LOOK_MS = 500
"""Milliseconds after which an idle engine is asked again for work: an executor may have reported a
dead worker."""


class _Terminated(BaseException):
    """SIGUSR1 has arrived, and the loop must end. The class is not an Exception, so that no
    plugin's `except` can catch it."""


def run(address: str, builder: str) -> None:
    """The body of the engine process. address: the address to listen on, "ipc://…". builder:
    "module:function" that is called with the plan.

    The engine listens and the parent connects, because a connecting socket queues messages until
    the other end listens. A listening socket would block instead.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    # milliseconds: the last message must be delivered, but a dead parent must not block this
    # process
    socket.linger = 2000
    socket.bind(address)
    try:
        take_signals(signal.SIG_IGN)
        engine, relay = _start(socket, builder)
        if engine is not None:
            try:
                _serve(socket, engine, relay)
            finally:
                engine.stop()
    except _Terminated:
        log.debug("engine process terminated")
    finally:
        socket.close()
        context.term()


def _on_terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(END_NOW, signal.SIG_IGN)
    raise _Terminated


def _start(socket: zmq.Socket[bytes], builder: str) -> tuple[Any, SampleRelay | None]:
    """Build the engine and report that it is ready. Return the engine, and the relay of its samples
    if A wants samples. Return (None, None) if the start failed, which is reported to A, or if A
    sent `Stop`."""
    relay = None
    try:
        build = load_function(builder)  # this takes long, and the parent makes the plan meanwhile
        message = decode_to_engine(socket.recv())
        if isinstance(message, Stop):
            return None, None
        assert isinstance(message, Start), message
        # until now the signal ended the process at once, because nothing needed an orderly end
        signal.signal(END_NOW, _on_terminate)
        engine = build(pickle.loads(message.plan))
        if message.wants_samples:
            relay = SampleRelay()
            engine.attach(relay)
        ready = encode(
            Ready(engine.stats(), list(relay.metrics) if relay else [], engine.limits.max_model_len)
        )
    except Exception as error:  # noqa: BLE001
        # every error at start is reported to the parent, which raises it
        _log_failure("the engine did not start", error)
        socket.send(encode(Dead(Failure.of(error), is_start=True)))
        return None, None
    socket.send(ready)
    return engine, relay


def _serve(socket: zmq.Socket[bytes], engine: Any, relay: SampleRelay | None) -> None:
    """Receive messages and run steps until `Stop` arrives. Blocks while there is nothing to do."""
    try:
        while True:
            while not engine.has_work and not socket.poll(LOOK_MS):
                pass
            if not _receive_all(socket, engine):
                return
            deltas = engine.step() if engine.has_work else ()
            if relay is not None and (sample := relay.take()):
                socket.send(encode(Measured(sample)))
            if deltas:
                socket.send(encode(StepDeltas(deltas)))
    except Exception as error:  # noqa: BLE001
        # after a failed step the state of the engine is unknown, so it has died
        _log_failure("the engine died", error)
        failure = Failure.of(error)
        failure.message = f"the engine died: {failure.message}"
        socket.send(encode(Dead(failure)))


def _receive_all(socket: zmq.Socket[bytes], engine: Any) -> bool:
    """Handle all messages that have arrived. Return False if one of them is `Stop`."""
    while True:
        try:
            message = decode_to_engine(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return True
        if isinstance(message, Add):
            _add(socket, engine, message)
        elif isinstance(message, Wake):
            engine.wake()
        elif isinstance(message, Abort):
            engine.abort(message.ids, message.reason)
        elif isinstance(message, Control):
            _control(socket, engine, message)
        elif isinstance(message, Stop):
            return False


def _add(socket: zmq.Socket[bytes], engine: Any, message: Add) -> None:
    try:
        engine.add(message.request)
    except PegboardError as error:
        if not isinstance(error, RequestError):
            log.error("request %s failed", message.request.request_id, exc_info=error)
        socket.send(encode(Rejected(message.request.request_id, Failure.of(error))))


def _control(socket: zmq.Socket[bytes], engine: Any, message: Control) -> None:
    """Start an action. Its answer is sent when it is done."""

    def answer(future: Future[Any]) -> None:
        try:
            reply = encode(ControlReply(message.call_id, future.result()))
        except Exception as error:
            # the failure of an action is the answer to its caller; the engine goes on
            if not isinstance(error, PegboardError):
                log.exception("the action %r failed", message.action)
            reply = encode(ControlReply(message.call_id, failure=Failure.of(error)))
        socket.send(reply)

    try:
        future = engine.control(message.action)
    except PegboardError as error:
        future = Future()
        future.set_exception(error)
    future.add_done_callback(answer)


def _log_failure(what: str, error: Exception) -> None:
    """Log the traceback of an error. For one of Pegboard's own errors, which the parent shows, log
    only a debug line, unless the failure of a plugin caused it."""
    is_shown = isinstance(error, PegboardError) and not isinstance(
        error, PluginFailure | EngineDeadError
    )
    if is_shown and not log.isEnabledFor(logging.DEBUG):
        log.debug("%s: %s", what, error)
    else:
        log.error("%s", what, exc_info=error)
