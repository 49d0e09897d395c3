"""Kind `api`: HTTP routes, in the API process (A). Ambient: runs only when enabled (the defaults
enable some)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from pegboard.data.media import MediaSource
    from pegboard.data.output import RequestOutput
    from pegboard.data.pooling_params import Pooling, PoolingParams
    from pegboard.data.prompt_embeds import PromptEmbeds
    from pegboard.data.request import LoRARequest
    from pegboard.data.sampling_params import BeamSearchParams, SamplingParams
    from pegboard.interfaces.builtin_tool import BuiltinTool
    from pegboard.interfaces.metrics import MetricsSink
    from pegboard.interfaces.multimodal_processor import Transcriber
    from pegboard.interfaces.output_parser import Parsers
    from pegboard.interfaces.tokenizer import Chat, Tokenizer


TRACE_HEADERS: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)
"""The trace headers of the HTTP request that is being answered. The server sets it."""

DATA_PARALLEL_RANK: ContextVar[int | None] = ContextVar("data_parallel_rank", default=None)
"""The engine that the HTTP request which is being answered must go to (X-data-parallel-rank)."""

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Who sent the HTTP request that is being answered: its address and API key. The server sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSpec(Spec):
    """public_paths: paths of this API that need no API key (health checks).
    content_types: media types that its routes accept as request bodies. The server refuses all
    others.
    unmeasured_paths: paths that the HTTP metrics leave out, because monitoring requests them all
    the time.
    switches: path → the flags that turn it on, for paths that are off by default. The answer 404
    names them.
    flags: "adapters" = its clients can name LoRA adapters as their model (`RequestOptions.lora`).
    "uploads" = the server setting max_upload_bytes limits its bodies, and not max_body_bytes."""

    FLAGS = frozenset({"adapters", "uploads"})

    public_paths: tuple[str, ...] = ()
    unmeasured_paths: tuple[str, ...] = ()
    content_types: tuple[str, ...] = ("application/json",)
    switches: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ApiSetup:
    """client: the engine. settings: the server settings that an API may read, as plain values (see
    `pegboard_server.settings.ServerConfig`), and the engine's enable_prompt_embeds. sinks: the
    metrics sinks of this process, by plugin name. builtin_tools: the plugins that serve each type
    of tool, in the order in which they are asked. modules: module → plugin, for `errors.blame`, to
    name a plugin that failed."""

    client: "EngineClient"
    settings: Mapping[str, Any] = field(default_factory=dict)
    sinks: Mapping[str, "MetricsSink"] = field(default_factory=dict)
    builtin_tools: Mapping[str, Sequence["BuiltinTool"]] = field(default_factory=dict)
    modules: Callable[[], Mapping[str, str]] = dict


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, as text, as token ids or as embeddings. text: if there are also token ids, the
    text that they came from. embeds: the rows of the whole prompt, or, with token ids, rows that
    replace some of their embeddings. chat: the conversation that the ids were rendered from. If it
    is given, a structured output starts after the reasoning with which this model begins its
    answers. second_text: a model with one class scores it together with `text`. media: the images,
    audio and videos that the placeholders in the text or the ids stand for, those of a modality in
    order. media_options: how they are processed. continuation: token ids after the prompt, in which
    nothing is a placeholder."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None
    chat: "Chat | None" = None
    embeds: "Sequence[PromptEmbeds]" = ()
    second_text: str | None = None
    media: "Sequence[MediaSource]" = ()
    media_options: Mapping[str, Any] = field(default_factory=dict)
    continuation: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """request_id: unique among running requests. response_id: the id that the client knows, if it
    is another one. Several requests may share it, and the action "abort" finds them by it.
    priority: requests with lower values go first. trace_headers: "traceparent" and "tracestate" for
    traces. None means those of the HTTP request that is being answered (`TRACE_HEADERS`).
    data_parallel_rank: the engine that it must go to. None means that of the HTTP request
    (`DATA_PARALLEL_RANK`), or any."""

    request_id: str
    response_id: str | None = None
    priority: int = 0
    lora: "LoRARequest | None" = None
    trace_headers: Mapping[str, str] | None = None
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model name that clients may use. parent: the base model's name, if this is an adapter.
    created: Unix time in seconds. pooling: the plan of a model that pools; None = it generates
    text. placeholders: modality → the text that stands for an image, say, in a chat; it has the
    modalities that the model takes besides text. interleaves: in a template for text, they stay
    between the texts (see `take_media`)."""

    name: str
    root: str
    max_model_len: int
    created: int
    parent: str | None = None
    placeholders: Mapping[str, str] = field(default_factory=dict)
    interleaves: bool = False
    pooling: "Pooling | None" = None

    @property
    def task(self) -> Literal["generate", "embed", "classify"]:
        """What it makes of prompts."""
        return "generate" if self.pooling is None else self.pooling.makes

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its classes."""
        return () if self.pooling is None else self.pooling.labels


@dataclass(frozen=True, slots=True)
class Health:
    """is_alive: the engine answers. is_stalled: its process runs, but a part of it has hung for a
    long time."""

    is_alive: bool
    reason: str = ""
    is_stalled: bool = False


class EngineClient(Protocol):
    """The engine as API plugins see it. `AsyncLLM` is one. All methods are called on the server's
    event loop."""

    def generate(
        self, prompt: Prompt, params: "SamplingParams | PoolingParams", request: RequestOptions
    ) -> "AsyncIterator[RequestOutput]":
        """Stream the outputs of all n completions in the form that `params.output_kind` asks for.
        With PoolingParams there is one output, which has `embedding`. Closing the iterator aborts
        the request. Before the first output it raises RequestError if anything is wrong with the
        request, Overloaded or EngineDeadError."""

    def beam_search(
        self, prompt: Prompt, params: "BeamSearchParams", request: RequestOptions
    ) -> "AsyncIterator[RequestOutput]":
        """Yield one final output with the `beam_width` best completions, best first. Everything
        else is as in `generate`."""

    def parsers(self) -> "Parsers":
        """Return the parsers for the answers of the served model."""

    def tokenizer(self) -> "Tokenizer":
        """Return the served model's tokenizer."""

    def io_processor(self) -> Any:
        """Return the `pegboard.interfaces.io_processor.IOProcessor` of the engine. Raises
        RequestError if the settings name none."""

    def transcriber(self) -> "Transcriber | None":
        """Return what says how the served model writes down speech, or None if it does not."""

    def models(self) -> Sequence[ServedModel]:
        """Return the base model's names first, then the adapters."""

    def default_params(self) -> Mapping[str, Any]:
        """Return the model's sampling defaults (generation_config and overrides) by SamplingParams
        field. `max_tokens` is included only if the model limits it."""

    async def adapter(self, name: str) -> "LoRARequest | None":
        """Return the LoRA adapter that a request names as its model, or None if there is no such
        adapter. An adapter that is not listed in `models` may be found and loaded now. Raises
        RequestError if there is one but it cannot be used."""

    async def control(self, action: str, **arguments: object) -> object:
        """Carry out an action and return its answer when it is done: "abort" (request_ids),
        "plugins", "settings", "load", "reset_mm_cache", or one that the engine knows, such as
        "sleep", "pause" and "reset_prefix_cache" with the arguments of the methods of `AsyncLLM`.
        Raises RequestError if there is no such action, and what it raises."""

    def health(self) -> Health:
        """Return the state of the engine as this process knows it. Cheap, because it does not ask
        the engine."""


class Api(Protocol):
    def routes(self) -> "Sequence[BaseRoute]":
        """Return the Starlette routes. Called once at start-up.

        Handlers raise PegboardError, and the server makes the API family's error body from it with
        `error_body`. `request.state.request_id` is the id of the HTTP request: its X-Request-Id
        header, or a fresh id. /openapi.json describes a route by the endpoint's docstring. If the
        endpoint has the attribute `body_model`, the pydantic model of the JSON body, that is
        described as well.
        """

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        """Return the JSON error body of this API family. It is also used for errors raised outside
        its handlers (authentication, 404)."""
