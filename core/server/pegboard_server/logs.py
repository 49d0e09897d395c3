"""Log lines of the HTTP server: where they are written, which paths are not logged, and generation
requests in vLLM's wording."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

from pegboard.data.output import RequestOutput
from pegboard.data.sampling_params import RequestOutputKind
from pegboard.errors import ConfigError
from pegboard.interfaces.api import EngineClient
from pegboard.log import get_logger
from pegboard_server.settings import ServerConfig

log = get_logger(__name__)

ERROR = "error"
"""The key in a request's state for the error that a route or a stream has answered itself. It is
only for the log."""


def apply_log_config(path: str) -> None:
    """Configure logging from a JSON or YAML file in the format of `logging.config.dictConfig`.
    Raises ConfigError."""
    try:
        content = _read(Path(path).expanduser())
        logging.config.dictConfig(content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"log_config_file {path!r}: {error}; expected what logging.config.dictConfig takes"
        ) from error


def _read(path: Path) -> Any:
    text = path.read_text("utf-8")
    if path.suffix not in (".yaml", ".yml"):
        return json.loads(text)
    try:
        import yaml
    except ImportError as error:
        raise ValueError(
            "reading YAML needs pyyaml (pip install pyyaml); JSON needs no extra package"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class _Quiet(logging.Filter):
    """Drops the access records of some paths, and the query of all others: a client may have put
    its key there."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for a record of a quiet path. uvicorn's access records carry (client,
        method, path, HTTP version, status)."""
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) < 3:
            return True
        path = str(arguments[2]).partition("?")[0]
        record.args = (*arguments[:2], path, *arguments[3:])
        return path not in self._paths


@contextlib.contextmanager
def access_log(config: ServerConfig) -> Iterator[None]:
    """Send uvicorn's records to Pegboard's log handlers, unless a configuration file decides, and
    drop those of quiet paths."""
    logger = logging.getLogger("uvicorn")
    ours = logging.getLogger("pegboard").handlers
    if ours and config.log_config_file is None:
        logger.handlers[:] = ours
        logger.propagate = False
    paths = {
        path.strip() for item in config.disable_access_log_for_endpoints for path in item.split(",")
    }
    quiet = _Quiet(frozenset(paths | {f"/{config.root_path.strip('/')}{path}" for path in paths}))
    access = logging.getLogger("uvicorn.access")
    access.addFilter(quiet)
    try:
        yield
    finally:
        access.removeFilter(quiet)


def logged(client: EngineClient, config: ServerConfig) -> EngineClient:
    """Returns the client for api plugins: `client` itself, or a `RequestLog` around it if `config`
    asks for one."""
    return cast(EngineClient, RequestLog(client, config)) if config.enable_log_requests else client


class RequestLog:
    """An engine client that logs every request. Parameters are logged at INFO. The prompt is logged
    only at DEBUG, because it is the user's. With `enable_log_outputs`, the generated text is logged
    too. All other methods are passed to the client."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client = client
        self._max_len = config.max_log_len
        self._logs_outputs = config.enable_log_outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, params: Any, request: Any) -> AsyncIterator[RequestOutput]:
        """Log the request, then generate with the client."""
        self._note(prompt, params, request)
        is_delta = params.output_kind is RequestOutputKind.DELTA
        return self._followed(
            self._client.generate(prompt, params, request), request.request_id, is_delta
        )

    def beam_search(self, prompt: Any, params: Any, request: Any) -> AsyncIterator[RequestOutput]:
        """Log the request, then search with the client."""
        self._note(prompt, params, request)
        return self._followed(
            self._client.beam_search(prompt, params, request), request.request_id, False
        )

    def _note(self, prompt: Any, params: Any, request: Any) -> None:
        log.info(
            "Received request %s: params: %s, lora_request: %s",
            request.request_id,
            params,
            request.lora,
        )
        if log.isEnabledFor(logging.DEBUG):
            text = self._cut(prompt.text)
            ids = self._cut(prompt.token_ids)
            log.debug("Request %s: prompt: %r, prompt_token_ids: %s", request.request_id, text, ids)

    def _cut(self, value: Any) -> Any:
        return value if value is None or self._max_len is None else value[: self._max_len]

    async def _followed(
        self, outputs: AsyncIterator[RequestOutput], request_id: str, is_delta: bool
    ) -> AsyncIterator[RequestOutput]:
        """Yields the outputs, and logs the text of each completion when it ends."""
        texts: dict[int, str] = {}
        async with contextlib.aclosing(cast(Any, outputs)) as stream:
            async for output in stream:
                if self._logs_outputs:
                    self._gather(output, texts, request_id, is_delta)
                yield output

    def _gather(
        self, output: RequestOutput, texts: dict[int, str], request_id: str, is_delta: bool
    ) -> None:
        for completion in output.outputs:
            before = texts.get(completion.index, "") if is_delta else ""
            texts[completion.index] = before + completion.text
            if completion.finish_reason is not None:
                text = self._cut(texts.pop(completion.index))
                reason = completion.finish_reason
                log.info(
                    "Generated response %s: index: %d, output: %r, finish_reason: %s",
                    request_id,
                    completion.index,
                    text,
                    reason,
                )
