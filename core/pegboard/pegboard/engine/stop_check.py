"""When does a completion end? Order and reasons are vLLM's; stop strings are found where the text is (A), not here."""

from __future__ import annotations

from pegboard.data.request import Request
from pegboard.data.sampling_params import SamplingParams


def append_until_stop(request: Request, token_ids: list[int], max_model_len: int) -> tuple[list[int], str | None]:
    """Append tokens one at a time; the first one that ends the completion is the last one kept. Returns the kept tokens and the
    finish reason ("stop", "length" or None); sets `request.stop_reason`.

    End of sequence and stop tokens count only from `min_tokens` outputs on. End of sequence leaves stop_reason None, a stop
    token is named there. A completion whose tokens fill max_model_len always ends.
    """
    for count, token in enumerate(token_ids, 1):
        request.output_token_ids.append(token)
        request.all_token_ids.append(token)
        reason = _reason(request, token, max_model_len)
        if reason is not None:
            return token_ids[:count], reason
    return token_ids, None


def _reason(request: Request, token: int, max_model_len: int) -> str | None:
    params = request.params
    assert isinstance(params, SamplingParams), "pooling requests produce no tokens"
    num_outputs = len(request.output_token_ids)
    if token in request.stop_token_ids and num_outputs >= params.min_tokens:
        is_eos = token in params.eos_token_ids and not params.ignore_eos
        request.stop_reason = None if is_eos else token
        return "stop"
    if len(request.all_token_ids) >= max_model_len or (params.max_tokens is not None and num_outputs >= params.max_tokens):
        return "length"
    return None
