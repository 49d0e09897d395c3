"""The methods of LLM that make vectors, classes and scores."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pegboard.data.output import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pegboard.data.pooling_params import PoolingParams, Task
from pegboard.data.request import EngineRequest, LoRARequest
from pegboard.errors import RequestError
from pegboard.front.prompts import PromptInput, as_prompt
from pegboard.interfaces.api import Prompt

if TYPE_CHECKING:
    from pegboard.front.llm_engine import LLMEngine

UseTqdm = bool | Callable[..., Any]
Loras = LoRARequest | Sequence[LoRARequest | None] | None
Params = PoolingParams | Sequence[PoolingParams] | None
Result = TypeVar("Result", bound=PoolingRequestOutput[Any])


class PoolingMethods:
    """They need a model that pools: an encoder, or a decoder with runner="pooling". pooling_params
    and lora_request: one for all prompts, or one per prompt. All raise RequestError if a prompt is
    wrong, before anything runs, or if the model does something else, and if a vector is not
    finite."""

    llm_engine: "LLMEngine"

    def is_sleeping(self) -> bool:
        raise NotImplementedError

    def next_id(self) -> str:
        """Return the id of a new request."""
        raise NotImplementedError

    def run_all(
        self, requests: Sequence[EngineRequest], prompts: Sequence[Prompt], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        """Run requests that are built, and return their outputs in order."""
        raise NotImplementedError

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: Loras = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of prompts, in their order."""
        return self._pool(
            "embed",
            prompts,
            EmbeddingRequestOutput,
            EmbeddingOutput,
            use_tqdm,
            pooling_params,
            lora_request,
        )

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: Loras = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the model's classes for prompts, in their order."""
        return self._pool(
            "classify",
            prompts,
            ClassificationRequestOutput,
            ClassificationOutput,
            use_tqdm,
            pooling_params,
            lora_request,
        )

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Loras = None,
        pooling_task: Task | None = None,
    ) -> list[PoolingRequestOutput[list[float]]]:
        """Return what the model makes of prompts, in their order, as numbers. pooling_task: "embed"
        or "classify"; None = what the model does."""
        return self._pool(
            pooling_task,
            prompts,
            PoolingRequestOutput[list[float]],
            list,
            use_tqdm,
            pooling_params,
            lora_request,
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
        With a model that makes vectors, the score is the cosine of their angle.
        """
        pairs = text_pairs(data_1, data_2)
        pooling = self.llm_engine.plan.pooling
        if pooling is not None and pooling.task == "embed":
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            made = dict(
                zip(
                    texts,
                    self.embed(
                        texts,
                        use_tqdm=use_tqdm,
                        pooling_params=pooling_params,
                        lora_request=lora_request,
                    ),
                    strict=True,
                )
            )
            return [scored(made[first], made[second]) for first, second in pairs]
        prompts = [Prompt(text=first, second_text=second) for first, second in pairs]
        outputs = self._pool(
            "classify",
            prompts,
            PoolingRequestOutput[list[float]],
            list,
            use_tqdm,
            pooling_params,
            lora_request,
        )
        return [score_of_classes(output) for output in outputs]

    def _pool(
        self,
        task: Task | None,
        prompts: PromptInput | Sequence[PromptInput],
        result: type[Result],
        make: Callable[[list[float]], object],
        use_tqdm: UseTqdm,
        pooling_params: Params,
        lora_request: Loras,
    ) -> list[Result]:
        if self.is_sleeping():
            raise RequestError("the engine sleeps; call wake_up first")
        all_prompts = [as_prompt(prompt) for prompt in as_list(prompts)]
        given = PoolingParams() if pooling_params is None else pooling_params
        build = self.llm_engine.builder.build_pooling
        requests = []
        for prompt, params, lora in zip(
            all_prompts,
            per_prompt("pooling_params", given, len(all_prompts)),
            per_prompt("lora_request", lora_request, len(all_prompts)),
            strict=True,
        ):
            if task is not None and isinstance(params, PoolingParams) and params.task is None:
                params = msgspec.structs.replace(params, task=task)
            requests.append(build(prompt, params, self.next_id(), lora=lora))
        outputs = self.run_all(requests, all_prompts, use_tqdm)
        for place, output in enumerate(outputs):
            if not output.embedding:
                reason = (
                    f"ended with {output.outputs[0].finish_reason!r}, without a vector; the log "
                    "has the reason"
                )
                raise RequestError(f"prompt {place} {reason}", parameter="prompts")
        made = [make(array("f", output.embedding).tolist()) for output in outputs]
        return [
            result(output.request_id, values, output.prompt_token_ids, output.num_cached_tokens)
            for output, values in zip(outputs, made, strict=True)
        ]


def text_pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of texts to score. Raises RequestError if the numbers of texts do not
    fit."""
    ones, others = ([texts] if isinstance(texts, str) else list(texts) for texts in (first, second))
    if wrong := [text for text in (*ones, *others) if not isinstance(text, str)]:
        raise RequestError(
            f"a score is that of two texts, got {type(wrong[0]).__name__}", parameter="data_1"
        )
    if not ones or not others:
        raise RequestError(
            "there are no texts to score", parameter="data_1" if not ones else "data_2"
        )
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        reason = (
            f"{len(ones)} texts are scored with {len(others)}; give one text, or as many as the "
            "others"
        )
        raise RequestError(reason, parameter="data_1")
    return list(zip(ones, others, strict=True))


def scored(first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    one = first.outputs.embedding
    other = second.outputs.embedding
    lengths = math.sqrt(math.fsum(x * x for x in one)) * math.sqrt(math.fsum(x * x for x in other))
    cosine = math.fsum(x * y for x, y in zip(one, other, strict=True)) / lengths if lengths else 0.0
    token_ids = [*(first.prompt_token_ids or ()), *(second.prompt_token_ids or ())]
    return ScoringRequestOutput(
        f"{first.request_id}-{second.request_id}", ScoringOutput(cosine), token_ids
    )


def score_of_classes(output: PoolingRequestOutput[list[float]]) -> ScoringRequestOutput:
    """Return the value of the only class. Raises RequestError if the model has more."""
    if len(output.outputs) != 1:
        raise RequestError(
            "a score is the value of a model with one class, and this model has "
            f"{len(output.outputs)}"
        )
    return ScoringRequestOutput(
        output.request_id,
        ScoringOutput(output.outputs[0]),
        output.prompt_token_ids,
        output.num_cached_tokens,
    )


def as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return one prompt or several as a list. One list of token ids is one prompt."""
    is_many = isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)
    if not is_many or (prompts and all(isinstance(item, int) for item in prompts)):  # type: ignore[union-attr]
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


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
