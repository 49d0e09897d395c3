"""`pegboard run-batch`: answers the requests of a file in OpenAI's batch format. The API plugins
answer them as over HTTP, but in this process.

A line is {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}. Any route
of an enabled API plugin can be used. An error in one line becomes the answer of that line, and the
other lines continue. Answers are in the order of the lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from pegboard import env
from pegboard.errors import PegboardError, UsageError
from pegboard.interfaces.command import CommandSetup, FlagParser
from pegboard.log import set_up_logging
from pegboard_command_run_batch.files import check_allowed, opened_input, opened_output
from pegboard_server.settings import ServerConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SERVER_SETTINGS = (
    "host",
    "port",
    "response_role",
    "max_log_len",
    "enable_log_requests",
    "enable_log_outputs",
    "enable_prompt_tokens_details",
    "trust_request_chat_template",
    "trust_request_mm_kwargs",
    "max_prompts_per_request",
)

OF_THE_PORT = (
    "host",
    "port",
    "uds",
    "root_path",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_ciphers",
    "enable_ssl_refresh",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
    "allow_credentials",
    "uvicorn_log_level",
    "disable_access_log",
    "disable_access_log_for_endpoints",
    "enable_request_id_headers",
    "h11_max_incomplete_event_size",
    "h11_max_header_count",
    "shutdown_timeout_s",
)
"""Settings that have an effect only with --enable-metrics. A config file that is shared with a
server may have them."""

NEVER_USED = (
    "api_server_count",
    "log_config_file",
    "enable_force_include_usage",
    "engine_stall_s",
    "engine_end_s",
    "plugin_call_s",
)

NUM_AT_ONCE = 512
"""The most requests in work at once. When it is reached, the next one waits for the oldest answer.
This keeps the engine busy and the memory use small."""


def make_parser(setup: CommandSetup) -> FlagParser:
    """The parser with all flags of the command."""
    parser = setup.parser(
        prog="pegboard run-batch",
        usage="pegboard run-batch -i INPUT -o OUTPUT [MODEL] [--SETTING VALUE ...]",
        description=(
            "Answer the requests of a file in OpenAI's batch format, one JSON object per line."
        ),
    )
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests: a path, or a URL (--allow-urls)",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers: a path, or a URL that takes PUT",
    )
    parser.add_argument(
        "--output-tmp-dir",
        metavar="DIR",
        help="folder for the answers until they are sent to a URL",
    )
    parser.add_argument(
        "--allow-urls",
        action="store_true",
        help="allow http:// and https:// URLs for input and output",
    )
    parser.add_argument(
        "--enable-metrics", action="store_true", help="also serve /metrics on --host and --port"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="refused: every answer has its usage",
    )
    parser.add_settings("server", "engine", "plugins", only={"server": SERVER_SETTINGS})
    return parser


class RunBatch:
    """The command `run-batch`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._setup = setup

    def run(self, words: Sequence[str]) -> int:
        """Answer all requests. Returns 0 even when some of them failed."""
        settings, arguments = make_parser(self._setup).parse_settings(words)
        _check_used(settings, arguments)
        if unused := unused_settings(settings, has_port=arguments.enable_metrics):
            print(f"run-batch has no use for these settings: {unused}", file=sys.stderr)
        server = msgspec.structs.replace(settings.section(ServerConfig), api_server_count=1)
        settings = replace(settings, sections={**settings.sections, "server": server})
        check_allowed(arguments.input_file, "--input-file", arguments.allow_urls)
        check_allowed(arguments.output_file, "--output-file", arguments.allow_urls)
        set_up_logging(env.log_level())
        output = opened_output(arguments.output_file, arguments.output_tmp_dir)
        with opened_input(arguments.input_file) as source, output as target:
            total, failed = asyncio.run(_run(settings, source, target, arguments))
        print(
            f"{total} requests, {failed} of them failed; answers are in {arguments.output_file}",
            file=sys.stderr,
        )
        return 0


def key_header(keys: Sequence[str] | None) -> dict[str, str]:
    """Return the header with the server's key, which the APIs ask for. keys: the setting `api_key`.
    The user who starts the batch may use them."""
    known = [env.api_key()] if keys is None else keys
    return {"x-api-key": str(known[0])} if known and known[0] else {}


def unused_settings(settings: Any, *, has_port: bool) -> str:
    """Return the given settings of a server that have no effect on a batch, each with its
    source."""
    names = NEVER_USED if has_port else (*OF_THE_PORT, *NEVER_USED)
    return ", ".join(
        f"{name} ({settings.sources[name]})" for name in names if name in settings.sources
    )


def _check_used(settings: Any, arguments: Any) -> None:
    """Raise ConfigError for flags that would have no effect."""
    from pegboard_server.adapters import check_adapters

    given = [name for name in ("host", "port") if settings.sources.get(name) == "the command line"]
    if arguments.enable_force_include_usage:
        raise UsageError(
            "--enable-force-include-usage has no effect here: a batch has no streams, and every "
            "answer has its usage"
        )
    if given and not arguments.enable_metrics:
        raise UsageError(
            f"--{given[0]} needs --enable-metrics: without it, run-batch opens no port"
        )
    check_adapters(settings)


async def _run(settings: Any, source: Path, target: IO[str], arguments: Any) -> tuple[int, int]:
    from pegboard import AsyncLLM
    from pegboard_server.app import load_adapters, open_app
    from pegboard_server.http_metrics import HTTP_METRICS

    client = await asyncio.to_thread(
        partial(AsyncLLM.from_settings, settings, metrics=HTTP_METRICS)
    )
    async with client:
        app = await open_app(client)
        await load_adapters(app)
        stop = asyncio.Event()
        serving = (
            asyncio.create_task(_serve(app, settings, client, stop))
            if arguments.enable_metrics
            else None
        )
        try:
            return await answer_all(
                app,
                source,
                target,
                key_header(settings.section(ServerConfig).api_key),
                show_progress=not arguments.disable_tqdm,
            )
        finally:
            stop.set()
            if serving is not None:
                await serving


async def _serve(app: "ASGIApp", settings: Any, client: Any, stop: asyncio.Event) -> None:
    from pegboard_server.server import run_server

    def tell(address: str) -> None:
        print(f"Metrics on {address}/metrics", file=sys.stderr)

    await run_server(
        app,
        settings.section(ServerConfig),
        health=client.health,
        on_ready=tell,
        stop=stop,
        catch_signals=False,
    )


async def answer_all(
    app: "ASGIApp",
    source: Path,
    target: IO[str],
    headers: Mapping[str, str],
    *,
    show_progress: bool,
) -> tuple[int, int]:
    """Write one answer for each line of `source` that is not blank. headers: of every request.
    Returns the number of requests, and the number of those that failed."""
    from tqdm import tqdm

    with source.open(encoding="utf-8", errors="replace") as file:
        total = sum(1 for line in file if line.strip())
    num_failed = 0
    known_ids: set[str] = set()
    waiting: deque[asyncio.Task[dict[str, Any]]] = deque()
    with tqdm(total=total, desc="Requests", file=sys.stderr, disable=not show_progress) as bar:
        try:
            for line in _lines(source):
                task = asyncio.create_task(_answer(app, line, known_ids, headers))
                task.add_done_callback(lambda _: bar.update(1))
                waiting.append(task)
                while len(waiting) >= NUM_AT_ONCE or (waiting and waiting[0].done()):
                    num_failed += _write(target, await waiting.popleft())
            while waiting:
                num_failed += _write(target, await waiting.popleft())
        finally:
            await _cancel(waiting)
    return total, num_failed


async def _cancel(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _lines(source: Path) -> Iterator[str]:
    with source.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip():
                yield line


def _write(target: IO[str], answer: dict[str, Any]) -> bool:
    """Write one answer. Returns True when it is an error."""
    target.write(json.dumps(answer, ensure_ascii=False) + "\n")
    return answer["error"] is not None


async def _answer(
    app: "ASGIApp", line: str, known_ids: set[str], headers: Mapping[str, str]
) -> dict[str, Any]:
    from pegboard_command_run_batch.asgi_client import post

    custom_id = None
    try:
        request = _parse(line)
        custom_id = request["custom_id"]
        _check(request, known_ids)
    except _BadLine as error:
        return _output(custom_id, 400, None, _error(str(error)))
    status, data = await post(app, request["url"], json.dumps(request["body"]).encode(), headers)
    try:
        body = json.loads(data)
    except ValueError:
        return _output(
            custom_id,
            500,
            None,
            _error(f"{request['url']} answered with something that is not JSON", 500),
        )
    if status != 200:
        return _output(custom_id, status, None, body)
    return _output(custom_id, status, body, None)


class _BadLine(PegboardError):
    """A line of the file is not a valid request."""


def _parse(line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"the line is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise _BadLine(f"the line is not a JSON object but a {type(request).__name__}")
    if not isinstance(request.get("custom_id"), str):
        raise _BadLine(f"custom_id must be text, got {request.get('custom_id')!r}")
    return request


def _check(request: dict[str, Any], known_ids: set[str]) -> None:
    if request["custom_id"] in known_ids:
        raise _BadLine(f"custom_id {request['custom_id']!r} was used by an earlier line")
    known_ids.add(request["custom_id"])
    unknown = [name for name in request if name not in ("custom_id", "method", "url", "body")]
    if unknown:
        raise _BadLine(f"unknown field {unknown[0]!r}; expected custom_id, method, url and body")
    if request.get("method") != "POST":
        raise _BadLine(f"method must be 'POST', got {request.get('method')!r}")
    url = request.get("url")
    if not isinstance(url, str) or not url.startswith("/") or not url.isascii():
        raise _BadLine(
            f"url must be the path of a route, such as /v1/chat/completions, got {url!r}"
        )
    body = request.get("body")
    if not isinstance(body, dict):
        raise _BadLine("body must be a JSON object: the request as it would be sent")
    if body.get("stream"):
        raise _BadLine("stream must not be set: a batch has no streams")
    if body.get("encoding_format") in ("bytes", "bytes_only"):
        raise _BadLine("encoding_format must be float or base64: the answers of a batch are JSON")


def _error(message: str, code: int = 400) -> dict[str, Any]:
    kind = "BadRequestError" if code == 400 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _output(custom_id: str | None, status: int, body: Any, error: Any) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"vllm-batch-{uuid.uuid4().hex}", "body": body}
    return {
        "id": f"vllm-{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
