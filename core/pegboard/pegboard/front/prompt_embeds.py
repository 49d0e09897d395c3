"""Prompts as embeddings, from tensors and arrays."""

from __future__ import annotations

from typing import Any

from pegboard.data.request import PromptEmbeds
from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import RequestError

DTYPES = ("float32", "float16", "bfloat16")


def prompt_embeds(value: Any) -> PromptEmbeds:
    """Return a torch tensor or a numpy array as plain values. Its shape is [tokens, width] or [1, tokens, width]. Raises
    RequestError for anything else; the engine checks the width and the values."""
    if isinstance(value, PromptEmbeds):
        return value
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if dtype not in DTYPES:
        got = f"dtype {dtype}" if dtype else type(value).__name__
        raise _refused(f"expected a torch tensor or a numpy array of {', '.join(DTYPES)}, got {got}")
    shape = tuple(value.shape)
    shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if len(shape) != 2:
        raise _refused(f"expected the shape [tokens, width], got {list(value.shape)}")
    if hasattr(value, "detach"):
        import torch

        value = value.detach().cpu().contiguous().view(torch.uint8).numpy()
    return PromptEmbeds(value.tobytes(), dtype, shape)


def check_parameters(params: SamplingParams) -> None:
    """Raise RequestError, which names the parameter, if it asks for something that needs the token ids of the prompt."""
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(params, name) is not None:
            raise RequestError(f"{name} needs the token ids of the prompt, and prompt_embeds has none", parameter=name)


def _refused(reason: str) -> RequestError:
    return RequestError(f"prompt_embeds: {reason}", parameter="prompt_embeds")
