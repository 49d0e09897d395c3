"""LLMEngine: requests in, outputs out, one step at a time, in the caller's process. `LLM` is built on it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.data.logprobs import TokenTexts
from pegboard.data.output import MetricValue, RequestOutput
from pegboard.data.request import EngineRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.boundary.spawn import BUILDER, load_function
from pegboard.errors import ConfigError, RequestError
from pegboard.front.metric_values import metric_values
from pegboard.front.output_stream import OutputStream
from pegboard.front.prompts import PromptInput, RequestBuilder, prompt_text
from pegboard.interfaces.metrics import Totals
from pegboard.log import get_logger

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.data.request import AdapterRef
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

log = get_logger(__name__)


class LLMEngine:
    """The engine with text at both ends. Not thread-safe.

    engine: an `engine.Engine`, or anything with its methods. tokenizer: None under `skip_tokenizer_init`. registry: where the
    plan's parsers are; None = there are none.
    """

    def __init__(
        self, plan: "EnginePlan", tokenizer: "Tokenizer | None", engine: Any, registry: "Registry | None" = None
    ) -> None:
        self.plan = plan
        self.registry = registry
        self.tokenizer = tokenizer
        self.engine = engine
        self._builder = RequestBuilder(plan, tokenizer, registry)
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._streams: dict[str, OutputStream] = {}
        self._totals: Totals | None = None
        if not plan.settings.engine.disable_log_stats:
            self._totals = Totals()
            engine.attach(self._totals)

    @classmethod
    def from_settings(cls, settings: "Settings") -> "LLMEngine":
        """Resolve the plan, load the model here. Raises what `plan.resolve` and the engine's construction raise.

        An engine nobody refers to any more is stopped, at the latest when the interpreter exits.
        """
        from pegboard.plan.engine_plan import make_tokenizer, resolve

        plan, registry = resolve(settings)
        tokenizer = None if settings.engine.skip_tokenizer_init else make_tokenizer(registry, plan)
        build_engine = load_function(BUILDER)  # imports torch: only now, when everything cheap has been checked
        engine = build_engine(plan)
        self = cls(plan, tokenizer, engine, registry)
        # A thread that is inside torch when the interpreter goes would abort the process.
        weakref.finalize(self, engine.stop)
        return self

    def prepare(
        self, request_id: str, prompt: PromptInput, params: SamplingParams, *, priority: int = 0, lora: "AdapterRef | None" = None
    ) -> EngineRequest:
        """A checked request that is not queued yet. Raises RequestError."""
        return self._builder.build(prompt, params, request_id, priority=priority, lora=lora)

    def submit(self, request: EngineRequest, prompt: str | None = None) -> None:
        """Queue a prepared request. Raises RequestError for an id in use and for what the engine refuses."""
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use by a running request", parameter="request_id")
        self.engine.add(request)
        self._streams[request.request_id] = OutputStream(
            request,
            self.tokenizer,
            self._texts,
            prompt=prompt,
            lora_request=request.lora,
            stream_interval=self.plan.settings.engine.stream_interval,
        )

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        lora_request: "AdapterRef | None" = None,
        priority: int = 0,
    ) -> None:
        """Check and queue a request."""
        self.submit(self.prepare(request_id, prompt, params, priority=priority, lora=lora_request), prompt_text(prompt))

    def step(self) -> list[RequestOutput]:
        """One engine step; outputs of the requests that have news, as their `output_kind` says. A request the engine gave
        up ends with finish_reason "error"; why is logged."""
        ended, touched = [], {}
        for delta in self.engine.step():
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            if stream.feed(delta):
                ended.append(stream.key(delta.index))
            touched[delta.request_id] = stream
        if ended:
            self.engine.abort(ended, "stop")
        outputs = [output for stream in touched.values() if (output := stream.take()) is not None]
        for output in outputs:
            if output.finished:
                stream = self._streams.pop(output.request_id)
                if stream.error is not None:
                    log.error("request %s failed: %s", output.request_id, stream.error)
        return outputs

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Forget requests; nothing more comes of them. Unknown ids are ignored."""
        known = [name for name in request_ids if self._streams.pop(name, None) is not None]
        if known:
            self.engine.abort(known)

    def abort_all(self) -> None:
        """Forget every request and let the engine finish what is in flight."""
        self.abort_request(list(self._streams))
        while self.engine.has_work:
            self.engine.step()

    def has_unfinished_requests(self) -> bool:
        return bool(self._streams)

    def get_num_unfinished_requests(self) -> int:
        return len(self._streams)

    def get_tokenizer(self) -> "Tokenizer":
        """Raises RequestError under `skip_tokenizer_init`."""
        if self.tokenizer is None:
            raise RequestError("no tokenizer: skip_tokenizer_init is set, so only token ids are served")
        return self.tokenizer

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end an output."""
        return self._builder.eos_token_ids

    def default_params(self) -> Mapping[str, Any]:
        """Sampling defaults of the model, by SamplingParams field."""
        return self.plan.default_params

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False when some are in use."""
        return bool(self.engine.control("reset_prefix_cache"))

    def get_metrics(self) -> list[MetricValue]:
        """Everything measured so far. Raises ConfigError under `disable_log_stats`."""
        if self._totals is None:
            raise ConfigError("get_metrics needs statistics: make the LLM with disable_log_stats=False")
        return metric_values(self._totals, self.plan.model_names[0])

    def shutdown(self) -> None:
        """Stop the engine and free its memory."""
        self._streams.clear()
        self.engine.stop()
