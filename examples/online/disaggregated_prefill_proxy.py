"""A proxy before two servers of one model: the first one computes prompts, the second one answers.
They share blocks of the KV cache in a folder.

pegboard serve --port 8001 --kv-connectors shared_storage \\
    --kv_connector.shared_storage.shared_storage_path blocks
pegboard serve --port 8002 --kv-connectors shared_storage \\
    --kv_connector.shared_storage.shared_storage_path blocks
python examples/online/disaggregated_prefill_proxy.py
"""

import argparse
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

client = httpx.AsyncClient(timeout=600)
ASK = {"do_remote_decode": True}


async def complete(request: Request) -> Response:
    body = await request.json()
    path = request.url.path
    short = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK}
    for name in ("max_completion_tokens", "stream_options"):
        short.pop(name, None)
    prefill = await client.post(request.app.state.prefill + path, json=short)
    if prefill.is_error:
        return JSONResponse(prefill.json(), prefill.status_code)
    # what the first server says is how the second one finds the blocks
    whole = {**body, "kv_transfer_params": prefill.json()["kv_transfer_params"]}
    sent = client.build_request("POST", request.app.state.decode + path, json=whole)
    answer = await client.send(sent, stream=True)

    async def content() -> AsyncIterator[bytes]:
        async for part in answer.aiter_bytes():
            yield part
        await answer.aclose()

    kind = answer.headers["content-type"]
    return StreamingResponse(content(), answer.status_code, media_type=kind)


def application(prefill: str, decode: str) -> Starlette:
    paths = ("/v1/completions", "/v1/chat/completions")
    app = Starlette(routes=[Route(path, complete, methods=["POST"]) for path in paths])
    app.state.prefill = prefill
    app.state.decode = decode
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill-url", default="http://localhost:8001")
    parser.add_argument("--decode-url", default="http://localhost:8002")
    parser.add_argument("--port", type=int, default=8000)
    words = parser.parse_args()
    uvicorn.run(application(words.prefill_url, words.decode_url), port=words.port)


if __name__ == "__main__":
    main()
