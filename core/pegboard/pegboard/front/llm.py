"""LLM: offline generation in the caller's process.

llm = LLM("org/model")
outputs = llm.generate(["Hello, my name is"], SamplingParams(max_tokens=32))
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Any

import msgspec

from pegboard.config.schema import Settings
from pegboard.data.media import take_media
from pegboard.data.output import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    MetricValue,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pegboard.data.pooling_params import PoolingParams, Task
from pegboard.data.request import EngineRequest, LoRARequest
from pegboard.data.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from pegboard.errors import EngineDeadError, RequestError
from pegboard.front.beam_search import (
    BeamSearch,
    BeamSearchOutput,
    check_beam_prompt,
    last_logprobs,
    longer,
    named,
    step_params,
)
from pegboard.front.controls import SyncControls
from pegboard.front.io_processing import required
from pegboard.front.llm_engine import LLMEngine
from pegboard.front.llm_pooling import results_of, score_of_classes, scored, text_pairs
from pegboard.front.prompt_forms import PromptInput, as_prompt
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.tokenizer import Chat, Tokenizer

Messages = Sequence[Mapping[str, Any]]
UseTqdm = bool | Callable[..., Any]
Loras = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(SyncControls):
    """One model, loaded in this process, for batches of prompts.

    settings: fields of `EngineConfig` by name, `plugin_options={"kind.name": {field: value}}`,
    `plugin_files=["FILE.py"]`, and fields of `PluginConfig`, as `plugins_deny=["kind:name"]`. If
    `model` is None, the default model is loaded. Use it as a context manager, or call `shutdown`,
    to free the memory. It is not thread-safe.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        from pegboard.config.sources import engine_settings

        settings.setdefault("disable_log_stats", True)
        self._open(LLMEngine.from_settings(engine_settings(model, settings)))

    @classmethod
    def from_settings(cls, settings: Settings) -> "LLM":
        """Return an LLM with resolved settings, as commands have them."""
        return cls.from_engine(LLMEngine.from_settings(settings))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> "LLM":
        """Return an LLM with an engine that is already built."""
        self = cls.__new__(cls)
        self._open(engine)
        return self

    def _open(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        super().__init__(engine._ask)
        self._request_ids = count()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the engine and free its memory."""
        self.llm_engine.shutdown()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts and return the outputs in the order of the prompts. One list of token
        ids is one prompt. sampling_params, lora_request and priority: one for all prompts, or one
        per prompt. sampling_params None: the model's defaults. use_tqdm: whether to show a progress
        bar, or a function that makes one. If one prompt is wrong or an adapter cannot be read,
        raises RequestError before anything runs. Ctrl-C aborts all prompts; the LLM can be used
        afterwards.
        """
        if self.is_sleeping():
            raise RequestError("the engine sleeps; call wake_up first")
        all_prompts = [as_prompt(prompt) for prompt in as_list(prompts)]
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        all_params = per_prompt("sampling_params", default, len(all_prompts))
        loras = per_prompt("lora_request", lora_request, len(all_prompts))
        priorities = per_prompt("priority", 0 if priority is None else priority, len(all_prompts))
        build = self.llm_engine.builder.build
        requests = []
        for prompt, params, lora, value in zip(
            all_prompts, all_params, loras, priorities, strict=True
        ):
            if isinstance(params, SamplingParams):
                params = params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
            requests.append(build(prompt, params, self._next_id(), priority=value or 0, lora=lora))
        for adapter in {lora for lora in loras if lora is not None and not lora.load_inplace}:
            self.llm_engine.add_lora(adapter)
        return self._run_all(requests, all_prompts, use_tqdm)

    def _next_id(self) -> str:
        return str(next(self._request_ids))

    def _run_all(
        self, requests: Sequence[EngineRequest], prompts: Sequence[Prompt], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                self.llm_engine.submit(request, prompt.text)
            done = self._run(len(requests), use_tqdm)
        except BaseException:  # also for Ctrl-C: the engine must not keep anything of this call
            with suppress(EngineDeadError):
                self.llm_engine.abort_all()
            raise
        return [done[request.request_id] for request in requests]

    def _run(self, num_requests: int, use_tqdm: UseTqdm) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with _progress(num_requests, use_tqdm) as advance, _interrupts_held() as raise_interrupt:
            while self.llm_engine.has_unfinished_requests():
                raise_interrupt()
                for output in self.llm_engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        advance(output)
        return done

    def reset_mm_cache(self) -> None:
        """Forget which images, audio and videos were processed."""
        self.llm_engine.reset_mm_cache()

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template (or
        `chat_template`, Jinja source). Parts of messages may be images, audio and video:
        {"type": "image_url", "image_url": {"url": …}}, {"type": "image_pil", "image_pil": image}.
        mm_processor_kwargs: how these are processed. Structured output starts after the reasoning,
        if the model has a reasoning parser. Raises RequestError as `generate` does, and if the
        template refuses a conversation."""
        tokenizer = self.get_tokenizer()
        prompts = []
        builder = self.llm_engine.builder
        interleaves = builder.plan.settings.engine.interleave_mm_strings
        for conversation in _conversations(messages):
            taken, media = take_media(conversation, builder.placeholders, interleaves=interleaves)
            chat = Chat(
                messages=taken,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                template_kwargs=chat_template_kwargs or {},
            )
            rendered = tokenizer.render(chat)
            prompts.append(
                Prompt(
                    text=rendered.text,
                    token_ids=rendered.token_ids,
                    chat=chat,
                    media=media,
                    media_options=mm_processor_kwargs or {},
                )
            )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
        )

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` best continuations of each prompt. All prompts are searched
        together. See `pegboard.front.beam_search`. Raises RequestError as `generate` does."""
        params_of_step = step_params(params)
        engine = self.llm_engine
        tokenizer = self.get_tokenizer()
        builder = engine.builder
        length = engine.plan.max_model_len
        all_prompts = [named(as_prompt(prompt)) for prompt in as_list(prompts)]
        for prompt in all_prompts:
            check_beam_prompt(prompt)
        first = [
            builder.build(prompt, params_of_step, f"beam-{index}")
            for index, prompt in enumerate(all_prompts)
        ]
        searches = [
            BeamSearch(request.prompt_token_ids, params, builder.eos_token_ids, length)
            for request in first
        ]
        every = list(zip(all_prompts, first, searches, strict=True))
        while any(search.beams for search in searches):
            inputs = [
                longer(prompt, beam.tokens, len(request.prompt_token_ids))
                for prompt, request, search in every
                for beam in search.beams
            ]
            outputs = iter(self.generate(inputs, params_of_step, use_tqdm=use_tqdm))
            for search in searches:
                if search.beams:
                    search.extend([last_logprobs(next(outputs)) for _ in search.beams])
        results = []
        for search in searches:
            best = search.best()
            for beam in best:
                beam.text = tokenizer.decode(
                    search.shown(beam), skip_special_tokens=params.skip_special_tokens
                )
            results.append(BeamSearchOutput(best))
        return results

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Loras = None,
        pooling_task: Task | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what the model makes of prompts, in their order, as arrays. The model must pool:
        an encoder, or a decoder with runner="pooling". pooling_params, lora_request: one for all
        prompts, or one per prompt. A mapping with the key "data" is for the IO processor
        (`io_processor_plugin`): its one output has what that makes of the data. pooling_task:
        "embed" or "classify", or "token_embed" or "token_classify" for a row for each token; None =
        what the model does. Raises RequestError if a prompt is wrong, before anything runs, if the
        model does something else, and if a vector is not finite."""
        if self.is_sleeping():
            raise RequestError("the engine sleeps; call wake_up first")
        if isinstance(prompts, Mapping) and "data" in prompts:
            return [self._processed(prompts["data"], use_tqdm, lora_request)]
        all_prompts = [as_prompt(prompt) for prompt in as_list(prompts)]
        pooling = PoolingParams() if pooling_params is None else pooling_params
        all_params = per_prompt("pooling_params", pooling, len(all_prompts))
        loras = per_prompt("lora_request", lora_request, len(all_prompts))
        build = self.llm_engine.builder.build_pooling
        requests = []
        for prompt, params, lora in zip(all_prompts, all_params, loras, strict=True):
            if isinstance(params, PoolingParams) and params.task is None:
                params = msgspec.structs.replace(params, task=pooling_task)
            requests.append(build(prompt, params, self._next_id(), lora=lora))
        outputs = self._pooled(requests, all_prompts, use_tqdm)
        return [
            PoolingRequestOutput(
                output.request_id,
                PoolingOutput(output.pooled()),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def _pooled(
        self, requests: list[EngineRequest], prompts: list[Prompt], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        outputs = self._run_all(requests, prompts, use_tqdm)
        for place, output in enumerate(outputs):
            if output.embedding_shape is None:
                raise RequestError(
                    f"prompt {place} ended with {output.outputs[0].finish_reason!r}, without a "
                    "vector; the log has the reason",
                    parameter="prompts",
                )
        return outputs

    def _processed(
        self, data: Any, use_tqdm: UseTqdm, lora_request: Loras
    ) -> PoolingRequestOutput[Any]:
        """Return what the IO processor makes of what the model makes of data."""
        builder = self.llm_engine.builder
        processor = required(builder.io_processor)
        pairs = processor.prompts(data)
        loras = per_prompt("lora_request", lora_request, len(pairs))
        requests = [
            builder.build_pooling(prompt, params, self._next_id(), lora=lora)
            for (prompt, params), lora in zip(pairs, loras, strict=True)
        ]
        outputs = self._pooled(requests, [prompt for prompt, _ in pairs], use_tqdm)
        return PoolingRequestOutput(
            outputs[0].request_id, PoolingOutput(processor.answer(data, outputs)), []
        )

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Loras = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of prompts, in their order. See `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
        )
        return results_of(outputs, EmbeddingRequestOutput, EmbeddingOutput)

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Loras = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the model's classes for prompts, in their order. See
        `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
        )
        return results_of(outputs, ClassificationRequestOutput, ClassificationOutput)

    def reward(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Loras = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the rewards of prompts, in their order: a row for each token, or for each step of
        a process reward model. See `encode`."""
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="token_classify",
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts belong together: data_1 is one text for all of data_2, or has as
        many.

        A model with one class reads both texts at once (cross-encoder), and its value is the score.
        With a model that makes vectors, the score is the cosine of their angle. If it makes one for
        each token (ColBERT), the score is the sum of each of data_1's best products with data_2's.
        """
        pairs = text_pairs(data_1, data_2)
        more: dict[str, Any] = {"use_tqdm": use_tqdm, "lora_request": lora_request}
        pooling = self.llm_engine.plan.pooling
        if pooling is not None and pooling.makes == "embed":
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            results = self.encode(texts, pooling_params, pooling_task=pooling.task, **more)
            vectors = dict(zip(texts, results, strict=True))
            return [scored(vectors[first], vectors[second]) for first, second in pairs]
        prompts = [Prompt(text=first, second_text=second) for first, second in pairs]
        outputs = self.encode(prompts, pooling_params, pooling_task="classify", **more)
        return [score_of_classes(output) for output in outputs]

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises RequestError if `skip_tokenizer_init` is set."""
        return self.llm_engine.builder.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the model's own defaults (generation_config and overrides)."""
        return SamplingParams(**self.llm_engine.plan.default_params)

    def get_metrics(self) -> list[MetricValue]:
        """Return everything measured so far as Counter, Gauge, Histogram and Vector objects of
        `pegboard.data.output`. The names are vLLM's. Raises ConfigError unless the LLM was made
        with disable_log_stats=False."""
        return self.llm_engine.get_metrics()


def as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return one prompt or several as a list. One list of token ids is one prompt."""
    is_many = isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)
    value: Any = prompts
    if not is_many or (value and all(isinstance(item, int) for item in value)):
        return [value]
    return list(value)


def per_prompt(name: str, value: Any, num_prompts: int) -> list[Any]:
    """Return a value for each prompt: the items of `value` if it is a sequence of that length, else
    `value` itself."""
    if not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(
            (
                f"{name} has {len(value)} entries for {num_prompts} prompts: give one for all, or "
                "one each"
            ),
            parameter=name,
        )
    return list(value)


def _conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return one or several conversations as a list. Raises RequestError for anything else."""
    many = messages if isinstance(messages, Sequence) else [messages]
    several = [messages] if many and isinstance(many[0], Mapping) else many
    for conversation in several:
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not is_list or not all(isinstance(message, Mapping) for message in conversation):
            got = f"got {str(messages)[:100]!r}"
            raise RequestError(
                (
                    "messages must be mappings with role and content, in one list or a list of "
                    f"lists; {got}"
                ),
                parameter="messages",
            )
    return list(several)  # type: ignore[arg-type]


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C, because an engine that is interrupted in the middle of a step cannot be used
    again. Yields a function that raises KeyboardInterrupt if Ctrl-C was pressed in the meantime.
    The end of the block raises it in any case.

    It does nothing in a thread other than the main thread, or if the program has set another
    handler for SIGINT.
    """
    is_pending = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal is_pending
        is_pending = True

    def check() -> None:
        nonlocal is_pending
        if is_pending:
            is_pending = False
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


@contextmanager
def _progress(total: int, use_tqdm: UseTqdm) -> Iterator[Callable[[RequestOutput], None]]:
    """Show a progress bar with the number of finished requests and the tokens per second. Yields a
    function that counts a finished request."""
    if not use_tqdm or not total:
        yield lambda output: None
        return
    from tqdm import tqdm

    make: Callable[..., Any] = tqdm if use_tqdm is True else use_tqdm
    start_s = time.perf_counter()
    num_prompt_tokens = num_output_tokens = 0

    def advance(output: RequestOutput) -> None:
        nonlocal num_prompt_tokens, num_output_tokens
        num_prompt_tokens += len(output.prompt_token_ids or ())
        num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed_s = max(time.perf_counter() - start_s, 1e-9)
        bar.set_postfix_str(
            f"input {num_prompt_tokens / elapsed_s:.0f} tok/s, output "
            f"{num_output_tokens / elapsed_s:.0f} tok/s"
        )
        bar.update(1)

    bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, file=sys.stderr)
    try:
        yield advance
    finally:
        bar.close()
