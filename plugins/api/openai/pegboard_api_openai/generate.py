"""POST /inference/v1/generate: token ids in, token ids out, as vLLM's route of that name."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pegboard.data.output import RequestOutput
from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.errors import MalformedRequest, RequestError
from pegboard.interfaces.api import EngineClient, Prompt
from pegboard_api_openai.answer import AnswerIds, last_outputs, merge, prompt_logprobs
from pegboard_api_openai.fields import GenerationFields, TokenRequest, TokenSampling
from pegboard_chat.off_loop import off_loop
from pegboard_chat.openai_format import TokenNames, chat_logprobs
from pegboard_chat.outputs import check_finished
from pegboard_chat.request_body import parse_body
from pegboard_chat.sampling_fields import SAME, constraint, sampling_values
from pegboard_server.json_api import in_pieces, served_model
from pegboard_server.streaming import while_connected

OUTSIDE = GenerationFields.model_fields.keys() - {*SAME, "logit_bias", "structured_outputs"}
"""Fields of other bodies that are not sampling parameters."""

DEFAULT_MAX_TOKENS = 16


class TokenRoute:
    """Generates for one prompt of token ids. The model's own sampling defaults are not used."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def answer(self, http: Request) -> Response:
        """Token ids in, token ids out, in one object."""
        body = await http.body()

        def read() -> tuple[TokenRequest, SamplingParams]:
            request = parse_body(body, TokenRequest)
            return request, token_params(request)

        request, params = await off_loop(len(body), read)
        _, lora = await served_model(self._client, request.model)
        ids = AnswerIds("generate-tokens", http, request.request_id, lora)
        prompt = Prompt(
            token_ids=request.token_ids, add_special_tokens=False, cache_salt=request.cache_salt
        )
        outputs = merge([self._client.generate(prompt, params, ids.options(request.priority))])
        (output,) = await while_connected(http.receive, last_outputs(outputs, 1))
        answer = await off_loop(
            1000 * len(output.outputs), lambda: in_pieces(whole(ids.response_id, output, params))
        )
        return Response(answer, media_type="application/json")


def token_params(request: TokenRequest) -> SamplingParams:
    """Return the sampling parameters of a request. Raises RequestError, which names the field that
    is wrong."""
    if request.stream:
        raise RequestError(
            "stream: this route answers in one object; /v1/completions streams token ids",
            parameter="stream",
        )
    if request.cache_salt == "":
        raise RequestError("cache_salt must not be empty", parameter="cache_salt")
    given: TokenSampling = request.sampling_params
    if wrong := sorted(OUTSIDE & given.model_fields_set):
        raise MalformedRequest(
            f"unknown field 'sampling_params.{wrong[0]}'", parameter="sampling_params"
        )
    return SamplingParams(
        **sampling_values(
            given, {}, DEFAULT_MAX_TOKENS if given.max_tokens is None else given.max_tokens
        ),
        logprobs=given.logprobs,
        structured_outputs=constraint(given.structured_outputs, {}, "structured_outputs"),
        extra_args={"kv_transfer_params": request.kv_transfer_params}
        if request.kv_transfer_params
        else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def whole(response_id: str, output: RequestOutput, params: SamplingParams) -> dict[str, Any]:
    """Return the answer. Raises PegboardError if the engine failed to finish a completion."""
    check_finished(output)
    names = TokenNames(as_ids=True)
    num_top = params.logprobs
    choices = [
        {
            "index": completion.index,
            "logprobs": None
            if num_top is None
            else chat_logprobs(completion.token_ids, completion.logprobs, num_top, names),
            "finish_reason": completion.finish_reason,
            "token_ids": completion.token_ids,
        }
        for completion in sorted(output.outputs, key=lambda item: item.index)
    ]
    return {
        "request_id": response_id,
        "choices": choices,
        "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
        "kv_transfer_params": output.kv_transfer_params,
    }
