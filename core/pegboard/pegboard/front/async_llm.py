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
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import msgspec

from pegboard.config.sources import describe_settings
from pegboard.data.output import RequestOutput
from pegboard.data.pooling_params import PoolingParams
from pegboard.data.sampling_params import BeamSearchParams, SamplingParams
from pegboard.engine.boundary.messages import (
    Abort,
    Add,
    Control,
    ControlReply,
    Dead,
    Failure,
    FromEngine,
    Measured,
    Ready,
    Rejected,
    StepDeltas,
)
from pegboard.engine.metrics.sinks import Sinks
from pegboard.errors import EngineDeadError, PegboardError, RequestError, blamed
from pegboard.front.beam_search import beam_search_online
from pegboard.front.output_stream import OutputStream
from pegboard.front.pauses import POLL_S, AsyncPauses
from pegboard.front.prompts import PromptInput, RequestBuilder, as_prompt
from pegboard.front.worker_calls import AsyncWorkerCalls
from pegboard.interfaces.api import (
    CLIENT,
    TRACE_HEADERS,
    Health,
    Prompt,
    RequestOptions,
    ServedModel,
)
from pegboard.interfaces.metrics import Metric, Sample
from pegboard.interfaces.output_parser import Parsers
from pegboard.log import get_logger

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.data.request import LoRARequest
    from pegboard.engine.boundary.client import EngineProcess
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

log = get_logger(__name__)

MANY_BYTES = 16 * 1024
"""Longer encoded logprobs of a prompt are converted in a thread: one position with 20 of them has
0.3 KiB and takes 60 µs."""

LONG_PROMPT_CHARS = 4096
"""Prompts with at least this many characters or ids are built in a thread, because that takes about
a millisecond."""


def start_engine(
    settings: "Settings", engine: "EngineProcess", *, wants_samples: bool = True
) -> "tuple[EnginePlan, Registry]":
    """Resolve the plan and send it to an engine process. wants_samples: the API processes run the
    enabled metrics plugins. Raises what `plan.resolve` raises."""
    from pegboard.plan.ambient import sink_entries
    from pegboard.plan.engine_plan import resolve

    plan, registry = resolve(settings)
    measures = (
        wants_samples
        and not settings.engine.disable_log_stats
        and bool(sink_entries(registry, settings.engine, "api"))
    )
    engine.start(plan, wants_samples=measures)
    return plan, registry


class AsyncLLM(AsyncWorkerCalls, AsyncPauses):
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
        engine: "EngineProcess | None" = None,
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
        self, settings: "Settings", engine: "EngineProcess | None", metrics: Sequence[Metric] | None
    ) -> None:
        from pegboard.engine.boundary.client import EngineProcess

        engine = engine or EngineProcess()
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
        from pegboard.plan.ambient import build_sinks
        from pegboard.plan.engine_plan import make_tokenizer

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
        self._engine = engine
        self._streams: dict[str, _Live] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = count()
        self._request_ids = count()
        self._ready: asyncio.Future[None] | None = None
        self._dead: EngineDeadError | None = None
        self._is_shut_down = False
        self._created = int(time.time())
        self._metrics, self._all_sinks = metrics or (), Sinks([*sinks.values()], self._modules)

    # --- start and end ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the engine is ready. Later calls return at once. Raises the error of the
        engine's start."""
        if self._ready is None:
            self._refuse_if_dead()
            self._ready = asyncio.get_running_loop().create_future()
            # asyncio wants it to be read
            self._ready.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._engine.attach(self._on_message, self._fail_everything)
        await asyncio.shield(self._ready)

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
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._dead is None:
            self._fail_everything(EngineDeadError("the engine was shut down"))
        self._all_sinks.close()
        self._engine.stop()

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, StepDeltas):
            self._on_deltas(message)
        elif isinstance(message, Measured):
            self._all_sinks.publish(message.sample)
        elif isinstance(message, Rejected):
            if live := self._streams.get(message.request_id):
                live.fail(message.failure.error())
        elif isinstance(message, ControlReply):
            future = self._calls.pop(message.call_id, None)
            if future is not None and not future.done():
                if message.failure is None:
                    future.set_result(message.result)
                else:
                    future.set_exception(message.failure.error())
        elif isinstance(message, Ready):
            self.info = message.info
            self.plan = self._builder.plan = self.plan.of_length(message.max_model_len)
            self._all_sinks.declare([*self._metrics, *message.metrics])
            assert self._ready is not None
            self._ready.set_result(None)
        elif isinstance(message, Dead):
            self._fail_start(message.failure.error())
            self._dead = EngineDeadError(f"the engine did not start: {message.failure.message}")

    def _on_deltas(self, message: StepDeltas) -> None:
        ended = []
        for delta in message.deltas:
            live = self._streams.get(delta.request_id)
            if live is None:  # aborted while the delta was on its way
                continue
            stream = live.stream
            try:
                if stream.feed(delta):
                    ended.append(stream.key(delta.index))
            except Exception as error:
                # a tokenizer can raise anything, and other requests must get their tokens
                log.exception("the answer to request %s could not be decoded", delta.request_id)
                live.fail(Failure.of(blamed(error, self._modules) or error).error())
                ended.append(delta.request_id)
            if stream.has_news:
                live.wake.set()
        if ended:
            self._engine.send(Abort(ended, "stop"))

    def _fail_start(self, error: PegboardError) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)

    def _fail_everything(self, error: EngineDeadError) -> None:
        self._dead = error
        self._fail_start(error)
        for live in self._streams.values():
            # one error for each stream, because raising adds to an exception's traceback
            live.fail(EngineDeadError(str(error)))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    # --- requests ---------------------------------------------------------------------------------

    def generate(
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
                request_id=name, priority=priority, lora=lora_request, trace_headers=trace_headers
            )
        return self._generate(prompt, params, request)

    async def _generate(
        self, prompt: PromptInput, params: SamplingParams | PoolingParams, options: RequestOptions
    ) -> AsyncIterator[RequestOutput]:
        await self.start()
        live = await self._add(prompt, params, options)
        stream = live.stream
        try:
            while True:
                await live.wake.wait()
                live.wake.clear()
                if stream.error is not None:
                    raise stream.error
                if len(stream.late) > MANY_BYTES:
                    await asyncio.to_thread(stream.add_late)
                output = stream.take()
                if output is not None:
                    yield output
                    if output.finished:
                        return
        finally:
            self._streams.pop(options.request_id, None)
            if not stream.is_finished and not live.is_lost:
                self._engine.send(Abort([options.request_id]))

    async def _add(
        self, prompt: PromptInput, params: SamplingParams | PoolingParams, options: RequestOptions
    ) -> "_Live":
        prompt = as_prompt(prompt)
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
            num_units >= LONG_PROMPT_CHARS or len(getattr(params, "bad_words", None) or ()) > 8
        )
        request = await asyncio.to_thread(build) if is_long else build()
        if headers := options.trace_headers or TRACE_HEADERS.get():
            request.trace_headers = dict(headers)
        request.client = CLIENT.get()
        self._refuse_if_dead()
        if options.request_id in self._streams:
            raise RequestError(
                f"request id {options.request_id!r} is in use by a running request",
                parameter="request_id",
            )
        live = self._streams[options.request_id] = _Live(
            self._builder.stream(request, prompt.text), options.response_id
        )
        self._engine.send(Add(request))
        return live

    def _refuse_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request: RequestOptions
    ) -> AsyncIterator[RequestOutput]:
        """Stream one final output with the `beam_width` best completions. See
        `pegboard.front.beam_search`."""
        return beam_search_online(self, prompt, params, request, self._builder.eos_token_ids)

    def parsers(self) -> Parsers:
        """Return the parsers that read the answers of the served model."""
        return self._builder.parsers

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests with finish reason "abort". An id may also be the `response_id` of requests.
        Unknown ids are ignored."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        running = [
            name for name, live in self._streams.items() if name in ids or live.response_id in ids
        ]
        if running:
            self._engine.send(Abort(running))

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
            ServedModel(name, root, plan.max_model_len, self._created, None, *plan.task)
            for name in plan.model_names
        ]

    def default_params(self) -> Mapping[str, Any]:
        return self.plan.default_params

    def publish(self, sample: Sample) -> None:
        """Publish a sample of this process to its sinks."""
        self._all_sinks.publish(sample)

    def health(self) -> Health:
        stalled = "" if self.errored else self._engine.stalled
        return Health(not (self.errored or stalled), str(self._dead or stalled), bool(stalled))

    @property
    def is_running(self) -> bool:
        return self._dead is None and not self._is_shut_down

    @property
    def errored(self) -> bool:
        return self._dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        return self._dead or EngineDeadError("the engine is alive")

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead."""
        self._refuse_if_dead()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks. Return False and do nothing while some are in use, unless
        `reset_running_requests` makes the running requests compute their tokens again."""
        return bool(
            await self.control("reset_prefix_cache", reset_running_requests=reset_running_requests)
        )

    async def start_profile(self, path: str) -> None:
        """Start the platform's profiler, which writes below the folder `path`."""
        await self.control("call", method="profile", args=[path])

    async def stop_profile(self) -> None:
        """Stop the profiler and write what it measured."""
        await self.control("call", method="profile", args=[None])

    async def adapter(self, name: str) -> "LoRARequest | None":
        return None

    # --- LoRA adapters ----------------------------------------------------------------------------

    async def add_lora(self, lora_request: "LoRARequest") -> bool:
        """Read an adapter into memory, and return True. Raises RequestError if it cannot be read or
        does not fit the model, if there is no room for it, or if LoRA is off."""
        while not await self.control("add_lora", lora=msgspec.to_builtins(lora_request)):
            lora_request = msgspec.structs.replace(lora_request, load_inplace=False)
            await asyncio.sleep(POLL_S)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. Running requests keep it until they end. Return False if none with
        this id is in memory."""
        return bool(await self.control("remove_lora", lora_id=lora_id))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory until it is removed. Raises RequestError if it is not in
        memory, or if as many adapters as there are slots are pinned."""
        return bool(await self.control("pin_lora", lora_id=lora_id))

    async def list_loras(self) -> set[int]:
        """Return the ids of the adapters in memory."""
        return set(cast("list[int]", await self.control("list_loras")))

    # --- control ----------------------------------------------------------------------------------

    async def control(self, action: str, **arguments: object) -> object:
        """Run a control action. This process answers "abort" (request_ids), "plugins", "settings"
        and "load" (the number of running prompts). `Engine.control` answers all others."""
        if action == "plugins":
            registry = self.registry
            installed, decisions = (
                (registry.describe(), registry.describe_decisions()) if registry else ([], [])
            )
            return {"installed": installed, "decisions": decisions}
        if action == "settings":
            return describe_settings(self.plan.settings)
        if action == "load":
            return len(self._streams)
        if action == "abort":
            await self.abort(arguments.get("request_ids") or arguments.get("request_id") or [])  # type: ignore[arg-type]
            return None
        await self.start()
        self._refuse_if_dead()
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._engine.send(Control(call_id, action, dict(arguments)))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)


class _Live:
    """A running request: its stream, and the event that wakes its consumer. is_lost: the engine no
    longer has the request, or never accepted it."""

    def __init__(self, stream: OutputStream, response_id: str | None) -> None:
        self.stream = stream
        self.response_id = response_id
        self.wake = asyncio.Event()
        self.is_lost = False

    def fail(self, error: PegboardError) -> None:
        """End the stream with an exception, which the consumer gets when it next wakes up."""
        if not self.stream.is_finished and not self.is_lost:
            self.stream.error = error
            self.is_lost = True
            self.wake.set()
