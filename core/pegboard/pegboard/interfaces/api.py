"""Kind `api`: HTTP routes, in the API process (A). Ambient: runs only when enabled (the defaults enable some)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from pegboard.data.output import RequestOutput
    from pegboard.data.request import AdapterRef
    from pegboard.data.sampling_params import BeamSearchParams, SamplingParams
    from pegboard.interfaces.builtin_tool import BuiltinTool
    from pegboard.interfaces.metrics import MetricsSink
    from pegboard.interfaces.output_parser import Parsers
    from pegboard.interfaces.tokenizer import Chat, Tokenizer


TRACE_HEADERS: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)
"""The trace context that came with the HTTP request being answered; the server sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSpec(Spec):
    """public_paths: paths of this API that need no API key (health checks).
    content_types: media types its routes accept as request bodies; the server refuses any other.
    unmeasured_paths: paths that the HTTP metrics leave out, because monitoring asks for them all the time."""

    public_paths: tuple[str, ...] = ()
    unmeasured_paths: tuple[str, ...] = ()
    content_types: tuple[str, ...] = ("application/json",)


@dataclass(frozen=True, slots=True)
class ApiSetup:
    """client: the engine. settings: the server settings that an API may read (plain values; see
    `pegboard.config.schema.ServerConfig`).
    sinks: the metrics sinks of this process, by plugin name. builtin_tools: by type of tool, the plugins that serve it, in the
    order in which they are asked."""

    client: "EngineClient"
    settings: Mapping[str, Any] = field(default_factory=dict)
    sinks: Mapping[str, "MetricsSink"] = field(default_factory=dict)
    builtin_tools: Mapping[str, Sequence["BuiltinTool"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: text or token ids. text: if there are token ids too, the text that they came from.
    chat: the conversation that the ids were rendered from; a structured output then starts after the reasoning that this model's
    chats begin with."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None
    chat: "Chat | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """request_id: unique among running requests. priority: lower values go first. trace_headers: "traceparent" and
    "tracestate" for traces; None = those of the HTTP request being answered (`TRACE_HEADERS`)."""

    request_id: str
    priority: int = 0
    lora: "AdapterRef | None" = None
    trace_headers: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name clients may use; `parent` is the base's name for an adapter. `created`: unix seconds."""

    name: str
    root: str
    max_model_len: int
    created: int
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Health:
    is_alive: bool
    reason: str = ""


class EngineClient(Protocol):
    """Core's service for api plugins; `AsyncLLM` is one. All methods are called on the server's event loop."""

    def generate(self, prompt: Prompt, params: "SamplingParams", request: RequestOptions) -> "AsyncIterator[RequestOutput]":
        """Stream outputs as `params.output_kind` says, all n completions in one stream. Closing the iterator aborts.
        Raises RequestError before the first output for anything wrong with the request, Overloaded, EngineDeadError."""

    def beam_search(self, prompt: Prompt, params: "BeamSearchParams", request: RequestOptions) -> "AsyncIterator[RequestOutput]":
        """One final output with the `beam_width` best completions, best first; otherwise as `generate`."""

    def parsers(self) -> "Parsers":
        """The parsers that read the answers of the served model."""

    def tokenizer(self) -> "Tokenizer":
        """The served model's tokenizer."""

    def models(self) -> Sequence[ServedModel]:
        """Base model names first, then adapters."""

    def default_params(self) -> Mapping[str, Any]:
        """Sampling defaults of the model (generation_config and overrides), by SamplingParams field; `max_tokens` only if
        the model limits it."""

    async def control(self, action: str, **arguments: object) -> object:
        """All other actions: "abort", "reset_prefix_cache", "plugins", "stats", …"""

    def health(self) -> Health:
        """Cheap: it does not ask the engine."""


class Api(Protocol):
    def routes(self) -> "Sequence[BaseRoute]":
        """Starlette routes; called once at start-up. Handlers raise PegboardError; the server turns it into the API family's
        error body through `error_body`. `request.state.request_id` is the id of the HTTP request: its X-Request-Id header, else a
        fresh one. /openapi.json describes a route by the endpoint's docstring and, if the endpoint has that attribute, by
        `body_model`: the pydantic model of the JSON body."""

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        """The JSON error body of this API family, for errors raised outside its handlers as well (auth, 404)."""
