"""LLMEngine: takes requests and returns outputs, one step at a time, in the caller's process. `LLM`
uses it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pegboard.config.data_parallel import engine_numbers
from pegboard.config.schema import Settings
from pegboard.data.output import Counter, Gauge, Histogram, MetricValue, RequestOutput, Vector
from pegboard.data.request import EngineRequest, LoRARequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.actions import Action
from pegboard.engine.boundary.spawn import BUILDER, load_function
from pegboard.errors import ConfigError, RequestError
from pegboard.front.controls import SyncControls
from pegboard.front.output_stream import OutputStream
from pegboard.front.prompt_forms import PromptInput, as_prompt
from pegboard.front.prompts import RequestBuilder
from pegboard.interfaces.metrics import PREFIX, Reading, Totals
from pegboard.log import get_logger

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

log = get_logger(__name__)


class LLMEngine(SyncControls):
    """An engine that takes and returns text. It is not thread-safe.

    engine: an `engine.Engine`, or anything with its methods. tokenizer: None if
    `skip_tokenizer_init` is set. registry: finds the plan's parsers; None = there are none.
    builder: makes the requests that `submit` takes.
    """

    def __init__(
        self,
        plan: "EnginePlan",
        tokenizer: "Tokenizer | None",
        engine: Any,
        registry: "Registry | None" = None,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.builder = RequestBuilder(plan, tokenizer, registry)
        self._outputs = _Outputs(engine)
        super().__init__(self._outputs.ask)
        self._totals: Totals | None = None
        if not plan.settings.engine.disable_log_stats:
            self._totals = Totals()
            engine.attach(self._totals)

    @property
    def engine_core(self) -> "LLMEngine":
        """Return this engine. Scripts for vLLM save sharded states with it."""
        return self

    @classmethod
    def from_settings(cls, settings: Settings) -> "LLMEngine":
        """Resolve the plan and load the model in this process. Raises what `plan.resolve` and
        `build_engine` raise.

        The engine stops when the LLMEngine is garbage-collected, or at the latest when the
        interpreter exits.
        """
        from pegboard.plan.engine_plan import make_tokenizer, resolve

        if (count := len(engine_numbers(settings.engine))) > 1:
            raise ConfigError(
                f"data_parallel_size: {count} engines need processes of their own, and LLM has one "
                "engine in this process; use AsyncLLM(…, data_parallel_size=…) or pegboard serve, "
                "or start a program for each data_parallel_rank"
            )

        plan, registry = resolve(settings)
        tokenizer = None if settings.engine.skip_tokenizer_init else make_tokenizer(registry, plan)
        # this imports torch, so it comes after all cheap checks
        build_engine = load_function(BUILDER)
        engine = build_engine(plan, in_program=True)
        self = cls(plan.of_length(engine.limits.max_model_len), tokenizer, engine, registry)
        # A thread that is inside torch when the interpreter exits would abort the process.
        weakref.finalize(self, engine.stop)
        return self

    def submit(self, request: EngineRequest, prompt: str | None = None) -> None:
        """Queue a request that the builder made. prompt: the text of the prompt, if it was given as
        text. Raises RequestError if its id is in use or the engine refuses it."""
        if request.request_id in self._outputs.streams:
            raise RequestError(
                f"request id {request.request_id!r} is in use by a running request",
                parameter="request_id",
            )
        self.engine.add(request)
        self._outputs.streams[request.request_id] = self.builder.stream(request, prompt)

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Check and queue a request. Raises RequestError."""
        prompt = as_prompt(prompt)
        self.submit(
            self.builder.build(prompt, params, request_id, priority=priority, lora=lora_request),
            prompt.text,
        )

    def step(self) -> list[RequestOutput]:
        """Run one engine step. Return the outputs of the requests that have new results, as their
        `output_kind` says. A request that the engine gave up ends with finish_reason "error", and
        the reason is logged. After the last request, steps go on until KV connectors have saved its
        blocks."""
        return self._outputs.step()

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Abort requests, which have no further outputs. Unknown ids are ignored."""
        if known := self._outputs.drop(request_ids):
            self.engine.abort(known)

    def reset_mm_cache(self) -> None:
        """Forget which images, audio and videos were processed."""
        self.builder.reset_mm_cache()

    def abort_all(self) -> None:
        """Abort all requests, and let the engine finish the steps in flight."""
        self.abort_request(list(self._outputs.streams))
        while self.engine.has_work:
            self.engine.step()

    def has_unfinished_requests(self) -> bool:
        return len(self._outputs) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self._outputs)

    def get_metrics(self) -> list[MetricValue]:
        """Return everything measured so far. Raises ConfigError if `disable_log_stats` is set."""
        if self._totals is None:
            raise ConfigError(
                "get_metrics needs statistics: make the LLM with disable_log_stats=False"
            )
        return metric_values(self._totals, self.plan.model_names[0])

    def shutdown(self) -> None:
        """Stop the engine and free its memory."""
        self._outputs.streams.clear()
        self.engine.stop()


class _Outputs:
    """The outputs of the running requests. It exists beside `LLMEngine` so that no reference cycle
    keeps an engine's memory until the next garbage collection. streams: request id → stream."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.streams: dict[str, OutputStream] = {}
        self._early: list[RequestOutput] = []

    def __len__(self) -> int:
        """The number of requests that have not returned all their outputs."""
        finished = sum(output.finished for output in self._early)
        return len(self.streams) + finished

    def drop(self, request_ids: Collection[str]) -> list[str]:
        """Return nothing more of these requests. Returns the ids of those that the engine has."""
        self._early = [each for each in self._early if each.request_id not in request_ids]
        return [name for name in request_ids if self.streams.pop(name, None) is not None]

    def ask(self, action: Action[Any]) -> Any:
        """Carry out an action. If it takes some steps, `step` returns their outputs later."""
        future = self._engine.control(action)
        while not future.done():
            self._early += self._step()
        return future.result()

    def step(self) -> list[RequestOutput]:
        """Return the outputs of one step, or those that came early."""
        early = self._early
        self._early = []
        return early or self._step()

    def _step(self) -> list[RequestOutput]:
        ended = []
        touched = {}
        for delta in self._engine.step():
            stream = self.streams.get(delta.request_id)
            if stream is None:
                continue
            if stream.feed(delta):
                ended.append(stream.key(delta.index))
            touched[delta.request_id] = stream
        if ended:
            self._engine.abort(ended, "stop")
        outputs = [output for stream in touched.values() if (output := stream.take()) is not None]
        for output in outputs:
            if output.finished:
                stream = self.streams.pop(output.request_id)
                if stream.error is not None:
                    log.error("request %s failed: %s", output.request_id, stream.error)
        while not self.streams and self._engine.has_work:
            self._engine.step()
        return outputs


def metric_values(totals: Totals, model_name: str) -> list[MetricValue]:
    """Return the sums of all samples in vLLM's classes, as `LLM.get_metrics` returns them. A
    counter with the label `position` becomes one Vector per engine."""
    values: list[MetricValue] = []
    for metric, readings in totals.readings():
        if metric.labels != ("position",):
            values.extend(_value(reading, *_series(reading, model_name)) for reading in readings)
            continue
        for engine in sorted({reading.engine for reading in readings}):
            readings_of_one = sorted(
                (one for one in readings if one.engine == engine),
                key=lambda one: int(one.labels[0]),
            )
            name, labels = _series(readings_of_one[0], model_name)
            del labels["position"]
            values.append(Vector(name, labels, [int(reading.value) for reading in readings_of_one]))
    return values


def _series(reading: Reading, model_name: str) -> tuple[str, dict[str, str]]:
    """Return the name and the labels as in vLLM."""
    metric = reading.metric
    name = metric.name.removesuffix("_total") if metric.type == "counter" else metric.name
    common = {"model_name": model_name, "engine": str(reading.engine)}
    labels = {label: common[label] for label in metric.common} | dict(
        zip(metric.labels, reading.labels, strict=True)
    )
    return (PREFIX if metric.prefixed else "") + name, labels


def _value(reading: Reading, name: str, labels: dict[str, str]) -> MetricValue:
    metric = reading.metric
    if metric.type == "counter":
        value = int(reading.value) if reading.value.is_integer() else reading.value
        return Counter(name, labels, value)  # type: ignore[arg-type]
    if metric.type == "gauge":
        return Gauge(name, labels, reading.value)
    edges = [*(str(edge) for edge in metric.buckets), "+Inf"]
    counts = (
        dict(zip(edges, accumulate(reading.bucket_counts), strict=True))
        if reading.bucket_counts
        else {}
    )
    return Histogram(name, labels, reading.count, reading.value, counts)
