"""Turns prompts into `EngineRequest`s. It finds every mistake in a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.config.schema import structured_outputs_config
from pegboard.data.logprobs import TokenTexts
from pegboard.data.media import no_media
from pegboard.data.pooling_params import PoolingParams
from pegboard.data.prompt_embeds import wrong_embeds
from pegboard.data.request import EngineRequest, LoRARequest
from pegboard.data.sampling_params import (
    NUM_DRAFTS,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from pegboard.errors import RequestError, blame, expect
from pegboard.front.io_processing import make_io_processor
from pegboard.front.media import Expanded, adapter_of, make_media
from pegboard.front.output_stream import OutputStream
from pegboard.front.pooled_prompts import first_tokens, ids_of_pair, pooling_of, with_prompt
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.kv_connector import KVConnectorSpec
from pegboard.interfaces.logits_processor import LogitsProcessorSpec
from pegboard.interfaces.output_parser import ChosenParser, OutputParserSetup, Parsers
from pegboard.plan.pooling import merged_pooling

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

TOKEN_TYPES = "token_types"
"""The name under which models declare the type of a token: 1 in the second of two texts, else 0."""

KV_PARAMETERS = "kv_transfer_params"
"""The key in `SamplingParams.extra_args` under which vLLM hands a request's parameters to KV
connectors."""


class RequestBuilder:
    """Builds engine requests for one model. It has no state after construction, so any thread may
    use it.

    tokenizer: None if the engine takes only token ids (`skip_tokenizer_init`). registry: finds the
    plan's parsers and its logits processors, which may refuse parameters; None = there are none.
    """

    def __init__(
        self, plan: "EnginePlan", tokenizer: "Tokenizer | None", registry: "Registry | None" = None
    ) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self._registry = registry
        is_named = plan.settings.engine.reasoning_parser != "auto"
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._named_reasoning = self.parsers.reasoning if is_named else None
        self._validators, self._arguments = _validators(plan, registry)
        self._kv_names = _kv_names(plan, registry)
        eos_token_ids = tokenizer.vocabulary().eos_token_ids if tokenizer is not None else ()
        self._media = make_media(plan, registry, tokenizer)
        self.io_processor = make_io_processor(plan, registry, self.get_tokenizer)
        self._feeds_encoder = self._media is not None and self._media.feeds_encoder
        self.transcriber = None if self._media is None else self._media.transcriber
        self.placeholders: Mapping[str, str] = {} if self._media is None else self._media.texts
        """Modality → the text that stands for an item in a chat."""
        self.eos_token_ids = list(dict.fromkeys([*plan.eos_token_ids, *eos_token_ids]))

    def get_tokenizer(self) -> "Tokenizer":
        """Return the tokenizer. Raises RequestError if `skip_tokenizer_init` is set."""
        if self.tokenizer is None:
            raise RequestError(
                "no tokenizer: skip_tokenizer_init is set, so only token ids are served"
            )
        return self.tokenizer

    def reset_mm_cache(self) -> None:
        """Forget which images, audio and videos were processed."""
        if self._media is not None:
            self._media.items.reset()

    def stream(self, request: EngineRequest, prompt: str | None) -> OutputStream:
        """Return a stream that turns the deltas of a built request into outputs. prompt: the text
        of the prompt, if it was given as text."""
        interval = self.plan.settings.engine.stream_interval
        return OutputStream(
            request, self.tokenizer, self._texts, prompt=prompt, stream_interval=interval
        )

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora: "LoRARequest | None" = None,
    ) -> EngineRequest:
        """Build the engine's form of a request. Raises RequestError, which names the field that is
        wrong."""
        if isinstance(params, PoolingParams):
            return self.build_pooling(prompt, params, request_id, priority=priority, lora=lora)
        # set before the text is tokenized, because that is part of the time to the first token
        arrival_s = time.time()
        if self.plan.pooling is not None:
            raise RequestError(
                "this engine makes vectors and does not generate text; start it with runner "
                "'generate' for that"
            )
        lora = lora or adapter_of(prompt, self.plan.settings.engine.default_mm_loras)
        self._check(params, priority, lora)
        if self._feeds_encoder:  # the tokenizer would add an end
            prompt = replace(prompt, add_special_tokens=False)
        token_ids, _ = (
            self._with_embeds(prompt, params)
            if prompt.embeds
            else self._token_ids(prompt, params.truncate_prompt_tokens, self.plan.max_model_len - 1)
        )
        expanded = self._with_media(prompt, params, token_ids)
        token_ids = expanded.token_ids
        params = params.clone(
            max_tokens=self.plan.max_model_len - len(token_ids)
            if params.max_tokens is None
            else params.max_tokens,
            eos_token_ids=self.eos_token_ids,
            bad_words_token_ids=self._bad_words(params.bad_words or ()),
            structured_outputs=self._after_reasoning(params.structured_outputs, prompt, token_ids),
        )
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            arrival_s=arrival_s,
            priority=priority,
            cache_salt=prompt.cache_salt,
            lora=lora,
            kv_transfer_params=self._kv_parameters(params),
            prompt_embeds=tuple(prompt.embeds) or expanded.rows,
            media=expanded.items,
            token_inputs=expanded.inputs,
        )

    def build_pooling(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora: "LoRARequest | None" = None,
    ) -> EngineRequest:
        """Build the engine's form of a request for the prompt's vector. Raises RequestError, which
        names the field that is wrong."""
        arrival_s = time.time()
        pooling = pooling_of(self.plan, prompt, params)
        prompt = with_prompt(prompt, params, pooling)
        merged = merged_pooling(params, pooling)
        unused = SamplingParams(
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=merged.task in pooling.from_start,
        )
        lora = lora or adapter_of(prompt, self.plan.settings.engine.default_mm_loras)
        self._check(unused, priority, lora)
        token_ids, types = self._token_ids(
            prompt, params.truncate_prompt_tokens, self.plan.max_model_len
        )
        expanded = self._with_media(prompt, params, token_ids)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=expanded.token_ids,
            media=expanded.items,
            prompt_embeds=expanded.rows,
            token_inputs={TOKEN_TYPES: list(types)} if types else expanded.inputs,
            params=unused,
            arrival_s=arrival_s,
            priority=priority,
            cache_salt=prompt.cache_salt,
            lora=lora,
            pooling=merged,
        )

    @cached_property
    def parsers(self) -> Parsers:
        """The parsers that the plan has chosen. There are none if `skip_tokenizer_init` is set.
        Raises PluginBroken if one cannot be imported."""
        plan = self.plan
        registry = self._registry
        if registry is None or self.tokenizer is None:
            return Parsers()
        backends = structured_outputs_config(plan.settings.engine).names
        entries = [
            entry
            for entry in registry.entries("structured_output")
            if not backends or entry.name in backends
        ]
        return Parsers(
            tool=_chosen(registry, "tool_parser", plan.tool_parser),
            reasoning=_chosen(registry, "reasoning_parser", plan.reasoning_parser),
            can_be_compact=any(
                registry.spec(entry).supports.get("compact") is True for entry in entries
            ),
        )

    def _after_reasoning(
        self, structure: StructuredOutputsParams | None, prompt: Prompt, token_ids: list[int]
    ) -> StructuredOutputsParams | None:
        """Return `structure` with the token ids that end the reasoning before it, unless it already
        has them.

        As in vLLM, the answer to a prompt that is not a chat is expected to reason only if the user
        has named the parser. The parser that a model family recommends is for chats only.
        """
        chat = prompt.chat
        parser = self._named_reasoning if chat is None else self.parsers.reasoning
        if (
            structure is None
            or structure.reasoning_end_token_ids is not None
            or parser is None
            or self.tokenizer is None
        ):
            return structure
        tools, template_kwargs = (
            ((), None) if chat is None else (chat.tools or (), chat.template_kwargs)
        )
        setup = OutputParserSetup.after_prompt(self.tokenizer, token_ids, tools, template_kwargs)
        ends = [
            self.tokenizer.encode(end, add_special_tokens=False)
            for end in parser.make(setup).reasoning_end()
        ]
        return msgspec.structs.replace(structure, reasoning_end_token_ids=ends)

    def _check(self, params: SamplingParams, priority: int, lora: "LoRARequest | None") -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling parameters must be SamplingParams, got {type(params).__name__}",
                parameter="sampling_params",
            )
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(
                f"priority must be an integer, got {priority!r}", parameter="priority"
            )
        if lora is not None and not isinstance(lora, LoRARequest):
            raise RequestError(
                f"lora_request must be a LoRARequest, got {type(lora).__name__}",
                parameter="lora_request",
            )
        params.check_against_model(
            vocab_size=self.plan.vocab_size, max_logprobs=self.plan.settings.engine.max_logprobs
        )
        if self.tokenizer is None:
            needs = [
                name
                for name in ("stop", "bad_words", "structured_outputs")
                if getattr(params, name)
            ]
            if needs:
                raise RequestError(
                    f"{needs[0]} needs a tokenizer, but skip_tokenizer_init is set",
                    parameter=needs[0],
                )
        arguments = set(params.extra_args or ()) - {KV_PARAMETERS, NUM_DRAFTS}
        if unknown := sorted(arguments - self._arguments) if self._arguments is not None else []:
            known = (
                f"known: {', '.join(sorted(self._arguments))}"
                if self._arguments
                else "none is configured"
            )
            raise RequestError(
                (
                    "extra_args (vllm_xargs): no logits processor (--logits-processors) reads "
                    f"{unknown[0]!r}; {known}"
                ),
                parameter="extra_args",
            )
        try:
            msgspec.msgpack.encode(params.extra_args, enc_hook=repr)
        except OverflowError as error:
            raise RequestError(
                "extra_args (vllm_xargs) has a number that 64 bits cannot hold",
                parameter="extra_args",
            ) from error
        for name, (plugin, validate) in self._validators.items():
            with blame(plugin):
                reason = validate(params)
                if not isinstance(reason, str | None):
                    raise TypeError(f"validate() returned {reason!r}, expected a reason or None")
            if reason is not None:
                raise RequestError(f"{name}: {reason}", parameter="extra_args")

    def _kv_parameters(self, params: SamplingParams) -> dict[str, Any] | None:
        """Return the parameters for the KV connectors. A null means "not given"."""
        parameters = (params.extra_args or {}).get(KV_PARAMETERS) or {}
        if not isinstance(parameters, dict):
            raise RequestError(
                f"{KV_PARAMETERS} must be an object, got {parameters!r:.60}",
                parameter=KV_PARAMETERS,
            )
        parameters = {name: value for name, value in parameters.items() if value is not None}
        if unknown := sorted(map(str, set(parameters) - self._kv_names)):
            known = (
                f"known: {', '.join(sorted(self._kv_names))}"
                if self._kv_names
                else "none is configured"
            )
            raise RequestError(
                (
                    f"{KV_PARAMETERS}: no KV connector (--kv-connectors) reads "
                    f"{unknown[0]!r:.60}; {known}"
                ),
                parameter=KV_PARAMETERS,
            )
        return parameters or None

    def _with_embeds(
        self, prompt: Prompt, params: SamplingParams
    ) -> tuple[list[int], Sequence[int]]:
        """Return the token ids of a prompt with embeddings, which are 0 where there are rows, and
        no token types."""
        for name in ("prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(params, name) is not None:
                raise RequestError(
                    f"{name} needs the token ids of the prompt, and prompt_embeds has none",
                    parameter=name,
                )
        if not self.plan.settings.engine.enable_prompt_embeds:
            raise wrong_embeds(
                "prompt_embeds",
                "prompts as embeddings are off; start with enable_prompt_embeds "
                "(--enable-prompt-embeds)",
            )
        longest = self.plan.max_model_len - 1
        if prompt.token_ids is not None:
            token_ids, types = self._token_ids(prompt, None, longest)
            for span in prompt.embeds:
                token_ids[span.start : span.stop] = [0] * len(token_ids[span.start : span.stop])
            return token_ids, types
        num_tokens = prompt.embeds[0].stop
        if num_tokens > longest:
            raise self._too_long(f"{num_tokens} tokens")
        return [0] * max(1, num_tokens), ()

    def _with_media(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, token_ids: list[int]
    ) -> Expanded:
        """Return the prompt with its images, audio and video, or with its padding."""
        if not prompt.media and not self._feeds_encoder:
            padded = token_ids if self._media is None else self._media.padded(token_ids)
            expanded = Expanded(padded, (), (), {})
        elif self._media is None:
            raise no_media(prompt.media[0].modality, prompt.media[0].path, ())
        elif params.truncate_prompt_tokens is not None or prompt.embeds:
            raise RequestError(
                "a prompt with images, audio or video cannot be truncated and has no prompt_embeds",
                parameter="truncate_prompt_tokens" if not prompt.embeds else "prompt_embeds",
            )
        else:
            expanded = self._media.expand(token_ids, prompt)
        longest = self.plan.max_model_len - (self.plan.pooling is None)
        if (num_tokens := len(expanded.token_ids)) > longest:
            what = "those of its media" if prompt.media else "its padding"
            raise self._too_long(f"{num_tokens} tokens, with {what}")
        # placeholders, whose place other tokens have taken, may be out of it
        vocab_size = self.plan.vocab_size
        if min(expanded.token_ids) < 0 or max(expanded.token_ids) >= vocab_size:
            outside = next(token for token in expanded.token_ids if not 0 <= token < vocab_size)
            raise RequestError(
                f"token id {outside} is out of vocabulary (size {vocab_size})", parameter="prompt"
            )
        return expanded

    def _token_ids(
        self, prompt: Prompt, limit: int | None, longest: int
    ) -> tuple[list[int], Sequence[int]]:
        """Return the token ids of the prompt and, for two texts, the type of each token. limit: the
        number of tokens to keep; -1 keeps as many as possible. A prompt for text keeps its last
        ones, a prompt for a vector its first ones. longest: the number of tokens that a prompt may
        have."""
        types: Sequence[int] = ()
        if limit is not None and limit > self.plan.max_model_len:
            reason = (
                f"truncate_prompt_tokens={limit} is over the model's max_model_len of "
                f"{self.plan.max_model_len}"
            )
            raise RequestError(reason, parameter="truncate_prompt_tokens")
        most = longest if limit == -1 else limit
        if prompt.media and self._media is not None:
            prompt = self._media.rewritten(prompt)
        if prompt.token_ids is not None:
            if limit is None and len(prompt.token_ids) > longest:
                raise self._too_long(f"{len(prompt.token_ids)} tokens")
            token_ids = list(prompt.token_ids)
            wrong = next(
                (
                    token
                    for token in token_ids
                    if not isinstance(token, int) or isinstance(token, bool)
                ),
                None,
            )
            if wrong is not None:
                raise RequestError(
                    f"prompt token ids must be integers, got {wrong!r}", parameter="prompt"
                )
        elif self.tokenizer is None:
            raise RequestError(
                "this engine takes token ids only (skip_tokenizer_init is set)", parameter="prompt"
            )
        else:
            text = prompt.text or ""
            second = prompt.second_text
            num_chars = len(text) + len(second or "")
            # it cannot fit
            if limit is None and num_chars > longest and num_chars > longest * self._longest_token:
                raise self._too_long(f"{num_chars} characters")
            if second is not None:
                token_ids, types = ids_of_pair(self.tokenizer, self.plan, text, second, most)
            else:
                encoded = self.tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)
                token_ids = expect(encoded, list, self.tokenizer, "encode")
        if most is not None and self.plan.pooling is None:
            token_ids = token_ids[-most:]
        elif most is not None and len(token_ids) > most:
            token_ids = first_tokens(self.tokenizer, prompt, token_ids, most)
        if not token_ids:
            if prompt.media and self._media is not None and self._media.begins_prompts:
                return [], types
            raise RequestError("the prompt is empty: it has no tokens", parameter="prompt")
        if len(token_ids) > longest:
            raise self._too_long(f"{len(token_ids)} tokens")
        return token_ids, types[: len(token_ids)]

    @cached_property
    def _longest_token(self) -> int:
        return self.get_tokenizer().vocabulary().longest_token()

    def _too_long(self, what: str) -> RequestError:
        also = " and must also hold at least one output token" if self.plan.pooling is None else ""
        return RequestError(
            f"the prompt has {what}, but max_model_len is {self.plan.max_model_len}{also}: "
            "shorten the prompt or set truncate_prompt_tokens",
            parameter="prompt",
        )

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word at the start of a text and after a space. The second
        form is included only if the space changes the first token and not the number of tokens.
        Otherwise it would ban the space itself. This is vLLM's rule."""
        banned: list[list[int]] = []
        for word in words:
            assert self.tokenizer is not None, "checked before"
            plain = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not plain:
                raise RequestError(f"bad_words: {word!r} has no tokens", parameter="bad_words")
            banned.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                banned.append(spaced)
        return banned


def _chosen(registry: "Registry", kind: str, name: str | None) -> ChosenParser | None:
    if name is None:
        return None
    entry = registry.find(kind, name)
    # load it now, so that a broken plugin fails at the start and not in the first request
    registry.load(entry)
    reads_special = "special_tokens" in registry.spec(entry).flags
    return ChosenParser(
        entry.name, lambda setup: registry.build(entry, setup), reads_special, entry.id
    )


def _kv_names(plan: "EnginePlan", registry: "Registry | None") -> frozenset[str]:
    """Return the names in `kv_transfer_params` that the configured KV connectors read."""
    names = plan.settings.engine.kv_connectors or ()
    specs = (
        [registry.spec(registry.find("kv_connector", name)) for name in names]
        if registry is not None
        else []
    )
    return frozenset().union(
        *(spec.parameters for spec in specs if isinstance(spec, KVConnectorSpec))
    )


def _validators(
    plan: "EnginePlan", registry: "Registry | None"
) -> tuple[dict[str, tuple[str, Callable[[SamplingParams], str | None]]], frozenset[str] | None]:
    """Return the functions of the configured logits processors that check a request's parameters,
    by name, each with the id of its plugin, and all names in `extra_args` that the processors read,
    or None if one of them does not say. Raises PluginError."""
    validators: dict[str, tuple[str, Callable[[SamplingParams], str | None]]] = {}
    arguments: frozenset[str] | None = frozenset()
    for name in plan.settings.engine.logits_processors or ():
        assert registry is not None, "a plan with plugins comes with their registry"
        entry = registry.find("logits_processor", name)
        spec = registry.spec(entry)
        assert isinstance(spec, LogitsProcessorSpec)
        arguments = (
            None if arguments is None or spec.arguments is None else arguments.union(spec.arguments)
        )
        if spec.validate is not None:
            validators[name] = entry.id, registry.function(entry, spec.validate, "validate")
    return validators, arguments
