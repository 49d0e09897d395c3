"""A proxy before two servers of one model: the first one encodes images, audio and video, the
second one answers. Both share a folder:

    pegboard serve MODEL --port 8001 --encoder-connector shared_storage --mm-encoder-only \\
        --encoder_connector.shared_storage.shared_storage_path rows
    pegboard serve MODEL --port 8002 --encoder-connector shared_storage \\
        --encoder_connector.shared_storage.shared_storage_path rows
    python examples/encoder_proxy.py http://localhost:8001 http://localhost:8002 8000
"""

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

client = httpx.AsyncClient(timeout=600)


def has_items(body: dict) -> bool:
    contents = [message.get("content") for message in body.get("messages", [])]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(part.get("type") != "text" for part in parts)


async def chat(request: Request) -> Response:
    body = await request.json()
    headers = {
        name: value
        for name, value in request.headers.items()
        if name in ("authorization", "x-request-id")
    }
    path = "/v1/chat/completions"
    if has_items(body):
        short = {**body, "max_tokens": 1, "stream": False}
        for name in ("max_completion_tokens", "stream_options"):
            short.pop(name, None)
        encoded = await client.post(request.app.state.encoder + path, json=short, headers=headers)
        if encoded.is_error:
            return JSONResponse(encoded.json(), encoded.status_code)
    sent = client.build_request(
        "POST", request.app.state.language + path, json=body, headers=headers
    )
    answer = await client.send(sent, stream=True)

    async def content() -> AsyncIterator[bytes]:
        async for part in answer.aiter_bytes():
            yield part
        await answer.aclose()

    kind = answer.headers["content-type"]
    return StreamingResponse(content(), answer.status_code, media_type=kind)


def application(encoder: str, language: str) -> Starlette:
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    app.state.encoder = encoder
    app.state.language = language
    return app


if __name__ == "__main__":
    uvicorn.run(application(*sys.argv[1:3]), port=int(sys.argv[3]))
