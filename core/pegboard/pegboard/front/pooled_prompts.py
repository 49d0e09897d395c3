"""The token ids of prompts that become vectors or scores: beginnings of texts, and pairs of
texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pegboard.data.pooling_params import Pooling, PoolingParams
from pegboard.errors import RequestError, expect
from pegboard.interfaces.api import Prompt

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan


def pooling_of(plan: "EnginePlan", prompt: Prompt, params: PoolingParams) -> Pooling:
    """Return what the engine makes of prompts. Raises RequestError if it generates text, or if the
    prompt or the parameters have the wrong form."""
    if plan.pooling is None:
        raise RequestError(
            "this engine generates text and does not make vectors; start it with runner "
            "'pooling' for that"
        )
    if not isinstance(params, PoolingParams):
        raise RequestError(
            f"pooling_params must be PoolingParams, got {type(params).__name__}",
            parameter="pooling_params",
        )
    if prompt.embeds:
        raise RequestError(
            "prompt_embeds: vectors are made of text, token ids and media only",
            parameter="prompt_embeds",
        )
    return plan.pooling


def with_prompt(prompt: Prompt, params: PoolingParams, pooling: Pooling) -> Prompt:
    """Return the prompt with what the model wants before a text for a vector. Raises RequestError
    for a name that it does not know."""
    name = pooling.prompt_name if params.prompt_name is None else params.prompt_name
    if not name:
        return prompt
    if name not in pooling.prompts:
        known = ", ".join(pooling.prompts) or "none"
        raise RequestError(
            f"prompt_name {name!r:.60} is not one of this model's prompts: {known}",
            parameter="prompt_name",
        )
    if prompt.text is None or prompt.token_ids is not None or pooling.makes != "embed":
        if params.prompt_name is None:
            return prompt
        raise RequestError("prompt_name is for texts that become vectors", parameter="prompt_name")
    return replace(prompt, text=pooling.prompts[name] + prompt.text)


def first_tokens(
    tokenizer: "Tokenizer | None", prompt: Prompt, token_ids: list[int], most: int
) -> list[int]:
    """Return the first tokens of a prompt. The special tokens after a text stay."""
    if (
        prompt.text is None
        or prompt.token_ids is not None
        or prompt.second_text is not None
        or tokenizer is None
    ):
        return token_ids[:most]
    text = tokenizer.encode(prompt.text, add_special_tokens=False)
    start = next((i for i in range(len(token_ids)) if token_ids[i : i + len(text)] == text), None)
    last = [] if start is None else token_ids[start + len(text) :]
    return [*token_ids[: most - len(last)], *last] if len(last) < most else token_ids[:most]


def ids_of_pair(
    tokenizer: "Tokenizer", plan: "EnginePlan", text: str, second: str, most: int | None
) -> tuple[list[int], list[int]]:
    """Return the token ids of two texts, and the type of each token. most: the number of tokens to
    keep. Raises RequestError if the model does not classify, or if the tokenizer cannot encode
    pairs."""
    if plan.pooling is None or plan.pooling.makes != "classify":
        raise RequestError(
            "only a model that classifies reads two texts together", parameter="data_2"
        )
    encode_pair = getattr(tokenizer, "encode_pair", None)
    if encode_pair is None:
        raise RequestError(
            "the model's tokenizer cannot encode two texts together", parameter="data_2"
        )
    token_ids, types = expect(
        encode_pair(text, second, limit=most), tuple, tokenizer, "encode_pair"
    )
    return list(token_ids), list(types)
