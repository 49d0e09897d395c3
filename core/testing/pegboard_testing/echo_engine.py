"""An engine without a model. It answers every prompt with the prompt's own tokens, repeated, one
per step. It replaces `engine.Engine` in tests of the engine process, `AsyncLLM` and `LLM`. It fails
on demand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from pegboard.data.request import EngineRequest, PositionLogprobs, RequestDelta
from pegboard.engine.actions import (
    Action,
    CollectiveRpc,
    IsPaused,
    IsSleeping,
    ResetPrefixCache,
    UpdateWeights,
)
from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.metrics import Metric, MetricsSink, Sample
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard.plan.engine_plan import EnginePlan
from pegboard.plugins.registry import PluginLock
from pegboard_testing.fake_limits import fake_limits

BUILDER = "pegboard_testing.echo_engine:build"
REFUSED_PRIORITY = 99
"""The engine refuses a request with this priority."""
STEP_S = 0.0005


def echo_plan(**engine: Any) -> EnginePlan:
    """Return a plan that fits `pegboard_testing.fake_client.ByteTokenizer`. engine: settings of the
    engine."""
    from pathlib import Path

    from pegboard.config.schema import EngineConfig, Settings

    checkpoint = Checkpoint(
        format="echo",
        path=Path("echo"),
        config={},
        architectures=("Echo",),
        tensors={},
        tokenizer=TokenizerPayload("bytes"),
    )
    return EnginePlan(
        settings=Settings(EngineConfig(**engine)),
        lock=PluginLock(),
        checkpoint=checkpoint,
        model_names=tuple(engine.get("served_model_name") or ["echo"]),
        max_model_len=engine.get("max_model_len") or 4096,
        vocab_size=258,
        eos_token_ids=(257,),
    )


def build(plan: EnginePlan) -> "EchoEngine":
    """Build the engine. A model called "broken" does not load, and one called "bug" raises an
    unexpected error."""
    if "broken" in plan.model_names:
        raise ModelError("the checkpoint is broken on purpose")
    if "bug" in plan.model_names:
        raise ZeroDivisionError("a bug on purpose")
    return EchoEngine(plan)


class EchoEngine:
    """Has the methods of `engine.Engine`."""

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.limits = fake_limits(max_model_len=plan.max_model_len)
        self.running: dict[str, EngineRequest] = {}
        self.aborted: list[str] = []
        self.updates: list[str] = []
        self._live: dict[str, set[int]] = {}
        self._num_done: dict[str, int] = {}
        self._ended: list[RequestDelta] = []
        self._fails = False
        self._sinks: list[MetricsSink] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._ended or self._fails)

    def add(self, request: EngineRequest) -> None:
        if request.priority == REFUSED_PRIORITY:
            raise RequestError("refused on purpose", parameter="priority")
        self.running[request.request_id] = request
        self._live[request.request_id] = set(range(request.params.n))
        self._num_done[request.request_id] = 0

    def attach(self, sink: MetricsSink) -> None:
        sink.declare([Metric("generation_tokens_total", "counter", "Tokens of all completions")])
        self._sinks.append(sink)

    def abort(self, ids: Sequence[str], reason: str = "abort") -> None:
        self.aborted += ids
        for name in ids:
            index, _, parent = name.partition("_")
            if name in self.running:
                for live in sorted(self._live[name]):
                    self._end(name, live, reason)
            elif parent in self.running and int(index) in self._live[parent]:
                self._end(parent, int(index), reason)

    def _end(self, request_id: str, index: int, reason: str) -> None:
        self._ended.append(RequestDelta(request_id=request_id, index=index, finish_reason=reason))
        self._live[request_id].discard(index)
        if not self._live[request_id]:
            del self.running[request_id]

    def step(self) -> list[RequestDelta]:
        if self._fails:
            raise RuntimeError("failed on purpose")
        time.sleep(STEP_S)
        deltas = self._ended
        self._ended = []
        for request_id, request in list(self.running.items()):
            deltas += self._step_one(request_id, request)
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        for sink in self._sinks:
            sink.publish(Sample(time.time(), counters={"generation_tokens_total": num_tokens}))
        return deltas

    def _step_one(self, request_id: str, request: EngineRequest) -> list[RequestDelta]:
        params = request.params
        assert params.max_tokens is not None
        done = self._num_done[request_id]
        token = request.prompt_token_ids[done % len(request.prompt_token_ids)]
        self._num_done[request_id] = done + 1
        reason = (
            "stop"
            if token in params.all_stop_token_ids
            else "length"
            if done + 1 == params.max_tokens
            else None
        )
        logprobs = None if params.logprobs is None else [PositionLogprobs([token], [-0.5], 1)]
        deltas = [
            RequestDelta(
                request_id=request_id,
                index=index,
                token_ids=[token],
                logprobs=logprobs,
                finish_reason=reason,
                stop_reason=token
                if reason == "stop" and token in (params.stop_token_ids or ())
                else None,
                num_cached_tokens=0 if done == 0 else None,
            )
            for index in sorted(self._live[request_id])
        ]
        if reason is not None:
            del self.running[request_id]
        return deltas

    def control(self, action: Action[Any]) -> Future[Any]:
        """`collective_rpc` of "echo", "aborted", "updates" and "fail" is for tests."""
        future: Future[Any] = Future()
        if isinstance(action, CollectiveRpc):
            future.set_result(self._call(action.method, action.kwargs))
        elif isinstance(action, ResetPrefixCache):
            future.set_result(not self.running)
        elif isinstance(action, IsSleeping | IsPaused):
            future.set_result(False)
        elif isinstance(action, UpdateWeights) and action.path in ("right", None):
            self.updates.append(action.path or "sent")
            future.set_result(None)
        else:
            future.set_exception(RequestError(f"cannot do {action}", parameter="action"))
        return future

    def _call(self, method: str, kwargs: dict[str, Any]) -> Any:
        self._fails = self._fails or method == "fail"
        notes = {"aborted": self.aborted, "updates": self.updates}
        return {"echo": [kwargs], "fail": [], **notes}[method]

    def wake(self) -> None:
        """Others have got a request."""

    def stats(self) -> dict[str, Any]:
        return {"num_running": len(self.running)}

    def stop(self) -> None:
        self.running.clear()
