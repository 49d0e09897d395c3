"""The routes of engines that pool: /v1/embeddings, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pegboard.data.media import take_media
from pegboard.data.output import RequestOutput
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import ApiSetup, EngineClient, Prompt
from pegboard.interfaces.tokenizer import Chat
from pegboard_api_pooling.answers import check_salt, json_response, listed, results, usage
from pegboard_api_pooling.chunks import Chunked, chunk, joined
from pegboard_api_pooling.fields import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from pegboard_api_pooling.pool import PoolingRoute
from pegboard_api_pooling.scores import Scorer, rank, read_documents, read_pairs
from pegboard_chat.off_loop import off_loop
from pegboard_chat.openai_format import read_messages
from pegboard_chat.prompt_field import read_prompts
from pegboard_chat.request_body import parse_body
from pegboard_chat.request_limits import PromptLimit
from pegboard_server.json_api import endpoint, error_body, in_pieces
from pegboard_server.pooling import Run, values

MAX_INPUTS = 1024
"""The number of inputs of one request, if the server has no setting."""


class PoolingApi:
    """Vectors, classes and scores of texts."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client
        self._most = setup.settings.get("max_prompts_per_request", MAX_INPUTS)
        self._scorer = Scorer(setup.client)
        self._limit = PromptLimit(setup.client)
        self._pooling = PoolingRoute(setup.client, self._prompts)

    def routes(self) -> Sequence[BaseRoute]:
        score = endpoint(self._score, ScoreRequest)
        rerank = endpoint(self._rerank, RerankRequest)
        return [
            Route("/v1/embeddings", endpoint(self._embed, EmbeddingRequest), methods=["POST"]),
            Route("/pooling", endpoint(self._pooling.answer, PoolingRequest), methods=["POST"]),
            Route("/classify", endpoint(self._classify, ClassifyRequest), methods=["POST"]),
            *(Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")),
            *(
                Route(path, rerank, methods=["POST"])
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    def _prompts(self, request: ClassifyRequest) -> list[Prompt]:
        """Return the prompts of a request. Raises RequestError, which names the field that is
        wrong."""
        if request.messages is None:
            wanted = ("add_generation_prompt", "continue_final_message")
            if given := [name for name in wanted if name in request.model_fields_set]:
                raise RequestError(f"{given[0]} needs messages", parameter=given[0])
            return read_inputs(request, self._most)
        if request.input is not None:
            raise RequestError("give either input or messages", parameter="messages")
        return [read_chat(request, self._client, self._limit.max_chars)]

    async def _embed(self, http: Request) -> Response:
        """The vector of every input."""
        body = await http.body()

        def read() -> tuple[EmbeddingRequest, list[Prompt], PoolingParams, list[Chunked] | None]:
            request = parse_body(body, EmbeddingRequest)
            prompts = self._prompts(request)
            params = request.params("embed", request.dimensions, request.prompt_name)
            return request, prompts, params, chunk(self._client, prompts, params)

        request, prompts, params, chunks = await off_loop(len(body), read)
        run = await Run(self._client, http, "embd", request).start()
        if chunks is None:
            outputs = await run.outputs(prompts, params)
        else:
            outputs = await self._of_chunks(run, chunks, params)
        return await results(run, request, outputs, "embedding", "embedding")

    async def _of_chunks(
        self, run: Run, chunks: Sequence[Chunked], params: PoolingParams
    ) -> list[RequestOutput]:
        """Return the outputs of inputs, some of which are long."""
        pooling = self._client.models()[0].pooling
        wanted = params.use_activation
        normalizes = (pooling is None or pooling.use_activation) if wanted is None else wanted
        pairs = [(prompt, each.params) for each in chunks for prompt in each.prompts]
        outputs = await run.outputs_of(pairs)
        return joined(chunks, outputs, normalizes=normalizes)

    async def _classify(self, http: Request) -> Response:
        """The probabilities of the model's classes, and the most likely one, of every input."""
        body = await http.body()

        def read() -> tuple[ClassifyRequest, list[Prompt], PoolingParams]:
            request = parse_body(body, ClassifyRequest)
            return request, self._prompts(request), request.params("classify")

        request, prompts, params = await off_loop(len(body), read)
        run = await Run(self._client, http, "classify", request).start()
        outputs = await run.outputs(prompts, params)
        labels = self._client.models()[0].labels
        data: list[dict[str, Any]] = []
        for index, output in enumerate(outputs):
            probs = values(output).tolist()
            best = max(range(len(probs)), key=probs.__getitem__)
            label = labels[best] if best < len(labels) else None
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return json_response(in_pieces(listed(run, outputs, data)))

    async def _score(self, http: Request) -> Response:
        """How well texts belong together."""
        body = await http.body()

        def read() -> tuple[ScoreRequest, list[tuple[str, str]]]:
            request = parse_body(body, ScoreRequest)
            return request, read_pairs(request, self._most)

        request, pairs = await off_loop(len(body), read)
        run = await Run(self._client, http, "score", request).start()
        scores, outputs = await self._scorer.scores(run, request, pairs)
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        return json_response(in_pieces(listed(run, outputs, data)))

    async def _rerank(self, http: Request) -> Response:
        """The documents that fit a query best, best first."""
        body = await http.body()

        def read() -> tuple[RerankRequest, list[str]]:
            request = parse_body(body, RerankRequest)
            return request, read_documents(request, self._most)

        request, documents = await off_loop(len(body), read)
        run = await Run(self._client, http, "rerank", request).start()
        scores, outputs = await self._scorer.scores(
            run, request, [(request.query, document) for document in documents]
        )
        results: list[dict[str, Any]] = [
            {
                "index": index,
                **({"document": {"text": documents[index]}} if request.return_documents else {}),
                "relevance_score": scores[index],
            }
            for index in rank(scores, request.top_n)
        ]
        return json_response(
            in_pieces(
                {"id": run.name, "model": run.model, "usage": usage(outputs), "results": results}
            )
        )


def read_inputs(request: ClassifyRequest, most: int) -> list[Prompt]:
    """Return the inputs as prompts. Raises RequestError, which names the field that is wrong."""
    salt = check_salt(request)
    prompts = read_prompts(request.input, most, "input")
    adds_special = request.add_special_tokens is not False
    return [
        Prompt(text=each, add_special_tokens=adds_special, cache_salt=salt)
        if isinstance(each, str)
        else Prompt(token_ids=each, add_special_tokens=False, cache_salt=salt)
        for each in prompts
    ]


def read_chat(request: ClassifyRequest, client: EngineClient, max_chars: int) -> Prompt:
    """Return a chat as a prompt, with its images, audio and video. Raises RequestError, which names
    the field that is wrong."""
    messages = read_messages(request.messages or ())
    model = client.models()[0]
    messages, media = take_media(messages, model.placeholders, interleaves=model.interleaves)
    chat = Chat(
        messages=messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=bool(request.add_special_tokens),
        max_chars=max_chars,
    )
    token_ids = client.tokenizer().render(chat).token_ids
    salt = check_salt(request)
    return Prompt(token_ids=token_ids, add_special_tokens=False, cache_salt=salt, media=media)
