"""AsyncLLM: an asyncio interface to an engine in another process. The server uses it as its engine
client, and programs can use it alone.

    async with AsyncLLM("org/model") as llm:
        async for output in llm.generate("Hello", SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

Each request has one `OutputStream` and one event. A slow consumer finds everything new in one
output, so no queue grows. Everything here runs on the event loop, except the tokenizing of long
prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from pegboard.config.data_parallel import chosen_engine
from pegboard.config.sources import describe_settings
from pegboard.data.output import PoolingOutput, PoolingRequestOutput, RequestOutput
from pegboard.data.pooling_params import PoolingParams
from pegboard.data.sampling_params import BeamSearchParams, SamplingParams
from pegboard.engine.actions import action_of
from pegboard.engine.boundary.messages import (
    Abort,
    Add,
    FromEngine,
    Measured,
    Ready,
    Rejected,
    Scaled,
    StepDeltas,
)
from pegboard.engine.metrics.sinks import Sinks
from pegboard.front.beam_search import beam_search_online
from pegboard.front.connection import Connected, EngineConnection
from pegboard.front.controls import AsyncControls
from pegboard.front.io_processing import required
from pegboard.front.prompt_forms import PromptInput, as_prompt
from pegboard.front.prompts import RequestBuilder
from pegboard.front.request_streams import RequestStream, RequestStreams
from pegboard.interfaces.api import (
    CLIENT,
    DATA_PARALLEL_RANK,
    TRACE_HEADERS,
    Prompt,
    RequestOptions,
    ServedModel,
)
from pegboard.interfaces.metrics import Metric, Sample
from pegboard.interfaces.multimodal_processor import Transcriber
from pegboard.interfaces.output_parser import Parsers
from pegboard.log import get_logger

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.data.request import LoRARequest
    from pegboard.engine.boundary.client import EngineProcess
    from pegboard.engine.boundary.engines import Engines
    from pegboard.interfaces.io_processor import IOProcessor
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

log = get_logger(__name__)

LONG_PROMPT_CHARS = 4096
"""Prompts with at least this many characters or ids are built in a thread, because that takes about
a millisecond."""


def start_engine(
    settings: "Settings", engine: "EngineProcess | Engines", *, wants_samples: bool = True
) -> "tuple[EnginePlan, Registry]":
    """Resolve the plan and send it to an engine process. wants_samples: the API processes run the
    enabled metrics plugins. Raises what `plan.resolve` raises."""
    from pegboard.plan.engine_plan import resolve
    from pegboard.plan.sinks import sink_entries

    plan, registry = resolve(settings)
    measures = (
        wants_samples
        and not settings.engine.disable_log_stats
        and bool(sink_entries(registry, settings.engine, "api"))
    )
    engine.start(plan, wants_samples=measures)
    return plan, registry


class AsyncLLM(AsyncControls, Connected):
    """The engine client of one model. All methods except the constructors must be called on one
    event loop.

    It is created from settings (`AsyncLLM(model, **settings)`, `from_settings`) or from parts
    (`of_plan`). The constructor starts the engine process. `start`, which `generate` and `async
    with` also call, waits until it is ready.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        from pegboard.config.sources import engine_settings

        self._open(engine_settings(model, settings), None, None)

    @classmethod
    def from_settings(
        cls,
        settings: "Settings",
        *,
        engine: "EngineProcess | Engines | None" = None,
        metrics: Sequence[Metric] | None = None,
    ) -> "AsyncLLM":
        """Start the engine process, unless it is given, and resolve the plan meanwhile. Raises what
        `plan.resolve` raises; the process has ended then. metrics: as in `of_plan`."""
        self = cls.__new__(cls)
        self._open(settings, engine, metrics)
        return self

    @classmethod
    def of_plan(
        cls,
        plan: "EnginePlan",
        registry: "Registry | None",
        engine: Any,
        *,
        metrics: Sequence[Metric] | None = None,
        tokenizer: "Tokenizer | None" = None,
    ) -> "AsyncLLM":
        """Return a client of an engine that already has its plan (see `start_engine`). engine: an
        `EngineProcess` or a `HubEngine`.

        metrics: the metrics that the caller measures in this process and passes to `publish`. The
        enabled metrics plugins get these and the engine's samples. None: the plugins do not run
        here. tokenizer: it replaces the one that `registry` builds.
        """
        self = cls.__new__(cls)
        self._connect(plan, registry, engine, metrics, tokenizer)
        return self

    def _open(
        self,
        settings: "Settings",
        engine: "EngineProcess | Engines | None",
        metrics: Sequence[Metric] | None,
    ) -> None:
        from pegboard.engine.boundary.engines import start_processes

        engine = engine or start_processes(settings.engine)
        try:
            plan, registry = start_engine(settings, engine, wants_samples=metrics is not None)
            self._connect(plan, registry, engine, metrics)
        except BaseException:
            engine.stop()
            raise

    def _connect(
        self,
        plan: "EnginePlan",
        registry: Any,
        engine: Any,
        metrics: Sequence[Metric] | None,
        tokenizer: "Tokenizer | None" = None,
    ) -> None:
        from pegboard.plan.engine_plan import make_tokenizer
        from pegboard.plan.sinks import build_sinks

        if tokenizer is None and not plan.settings.engine.skip_tokenizer_init:
            tokenizer = make_tokenizer(registry, plan)
        self._modules = registry.modules if registry is not None else dict
        sinks = (
            {}
            if metrics is None
            else build_sinks(registry, plan.settings.engine, plan.model_names[0], "api")
        )
        self.plan = plan
        self.registry = registry
        self.sinks = sinks
        self.info: Mapping[str, Any] = {}
        self._builder = RequestBuilder(plan, tokenizer, registry)
        self._streams = RequestStreams(self._modules)
        self._connection = EngineConnection(engine, self._on_message, self._streams.fail_all)
        super().__init__(self._connection.ask)
        self._request_ids = count()
        self._created = int(time.time())
        self._metrics = metrics or ()
        self._all_sinks = Sinks([*sinks.values()], self._modules)
        self.publish: Callable[[Sample], None] = self._all_sinks.publish
        """Publishes a sample of this process to its sinks."""

    # --- start and end ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the engine is ready. Later calls return at once. Raises the error of the
        engine's start."""
        await self._connection.start()

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
        except BaseException:
            self.shutdown()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the engine process, and all streams with EngineDeadError. Blocks until the process is
        gone. A second call does nothing."""
        self._all_sinks.close()
        self._connection.stop()

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, StepDeltas):
            if ended := self._streams.feed(message.deltas):
                self._connection.send(Abort(ended, "stop"))
        elif isinstance(message, Measured):
            self._all_sinks.publish(message.sample)
        elif isinstance(message, Rejected):
            self._streams.fail(message.request_id, message.failure.error())
        elif isinstance(message, Ready):
            self.info = message.info
            self.plan = self._builder.plan = self.plan.of_length(message.max_model_len)
            self._all_sinks.declare([*self._metrics, *message.metrics])
        elif isinstance(message, Scaled):
            self.plan = self._builder.plan = self.plan.of_engines(
                message.num_engines, message.max_model_len
            )

    # --- requests ---------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptInput,
        params: SamplingParams | PoolingParams | None = None,
        request: RequestOptions | str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: "LoRARequest | None" = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream outputs as `params.output_kind` says. Closing the iterator or cancelling its task
        aborts the request.

        Both `generate(prompt, params, RequestOptions(...))` and vLLM's `generate(prompt,
        sampling_params, request_id)` work. Without an id, one is made. PoolingParams ask for one
        output, with `embedding`. Raises RequestError before the first output, EngineDeadError if
        the engine dies, and PegboardError if the engine gave up the request.
        """
        params = params if params is not None else sampling_params
        if params is None:
            params = SamplingParams(**self.default_params())
        if not isinstance(request, RequestOptions):
            name = request or request_id or f"request-{next(self._request_ids)}"
            request = RequestOptions(
                request_id=name,
                priority=priority,
                lora=lora_request,
                trace_headers=trace_headers,
                data_parallel_rank=data_parallel_rank,
            )
        await self.start()
        live = await self._add(prompt, params, request)
        try:
            while True:
                output = await live.next_output()
                yield output
                if output.finished:
                    return
        finally:
            self._streams.remove(request.request_id)
            if not live.stream.is_finished and not live.is_lost:
                self._connection.send(Abort([request.request_id]))

    async def encode(
        self,
        prompt: PromptInput,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield what the model makes of a prompt, once. options: see `generate`, which it calls."""
        async for output in self.generate(
            prompt, pooling_params or PoolingParams(), request_id, **options
        ):
            if output.embedding_shape is not None:
                yield PoolingRequestOutput(
                    output.request_id,
                    PoolingOutput(output.pooled()),
                    output.prompt_token_ids,
                    output.num_cached_tokens,
                )

    async def _add(
        self, prompt: PromptInput, params: SamplingParams | PoolingParams, options: RequestOptions
    ) -> RequestStream:
        prompt = prompt if isinstance(prompt, Prompt) else as_prompt(prompt)
        build = partial(
            self._builder.build,
            prompt,
            params,
            options.request_id,
            priority=options.priority,
            lora=options.lora,
        )
        num_units = max(len(prompt.text or ""), len(prompt.token_ids or ()))
        is_long = (
            bool(prompt.media)
            or num_units >= LONG_PROMPT_CHARS
            or len(getattr(params, "bad_words", None) or ()) > 8
        )
        request = await asyncio.to_thread(build) if is_long else build()
        if headers := options.trace_headers or TRACE_HEADERS.get():
            request.trace_headers = dict(headers)
        request.client = CLIENT.get()
        engine = chosen_engine(
            self.plan.settings.engine, options.data_parallel_rank, DATA_PARALLEL_RANK.get()
        )
        self._connection.check()
        live = RequestStream(self._builder.stream(request, prompt.text), options.response_id)
        self._streams.add(options.request_id, live)
        self._connection.send(Add(request, engine))
        return live

    def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request: RequestOptions
    ) -> AsyncIterator[RequestOutput]:
        """Stream one final output with the `beam_width` best completions. See
        `pegboard.front.beam_search`."""
        return beam_search_online(self, prompt, params, request, self._builder.eos_token_ids)

    def parsers(self) -> Parsers:
        """Return the parsers that read the answers of the served model."""
        return self._builder.parsers

    def transcriber(self) -> Transcriber | None:
        """Return what says how the served model writes down speech, or None if it does not."""
        return self._builder.transcriber

    def io_processor(self) -> "IOProcessor":
        """Return the IO processor that the settings name. Raises RequestError if they name none."""
        return required(self._builder.io_processor)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests with finish reason "abort". An id may also be the `response_id` of requests.
        Unknown ids are ignored."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        running = self._streams.named(ids)
        if running:
            self._connection.send(Abort(running))

    # --- other methods ----------------------------------------------------------------------------

    def tokenizer(self) -> "Tokenizer":
        """Return the served model's tokenizer. Raises RequestError if `skip_tokenizer_init` is
        set."""
        return self._builder.get_tokenizer()

    get_tokenizer = tokenizer

    def models(self) -> Sequence[ServedModel]:
        """Return one entry per served name."""
        plan = self.plan
        root = plan.settings.engine.model or plan.model_names[0]
        return [
            ServedModel(
                name,
                root,
                plan.max_model_len,
                self._created,
                None,
                self._builder.placeholders,
                plan.settings.engine.interleave_mm_strings,
                plan.pooling,
            )
            for name in plan.model_names
        ]

    def default_params(self) -> Mapping[str, Any]:
        return self.plan.default_params

    async def reset_mm_cache(self) -> None:
        self._builder.reset_mm_cache()

    async def adapter(self, name: str) -> "LoRARequest | None":
        return None

    # --- control ----------------------------------------------------------------------------------

    async def control(self, action: str, **arguments: object) -> object:
        """Run a control action. This process answers "abort" (request_ids), "plugins", "settings",
        "load" (the number of running prompts) and "reset_mm_cache". The engine answers all others,
        by their tag in `pegboard.engine.actions`."""
        if action == "plugins":
            registry = self.registry
            return {
                "installed": registry.describe() if registry else [],
                "decisions": registry.describe_decisions() if registry else [],
            }
        if action == "settings":
            return describe_settings(self.plan.settings)
        if action == "load":
            return len(self._streams)
        if action == "abort":
            await self.abort(arguments.get("request_ids") or [])  # type: ignore[arg-type]
        elif action == "reset_mm_cache":
            await self.reset_mm_cache()
        else:
            return await self._ask(action_of(action, arguments))
        return None
