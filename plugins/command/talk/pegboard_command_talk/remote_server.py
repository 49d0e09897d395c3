"""A running server, called over HTTP with the standard library only. It streams server-sent
events."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from pegboard.errors import PegboardError

TIMEOUT_S = 600.0
LOADING_S = 600.0
INTERVAL_S = 0.5
"""Seconds between two attempts while the model is loading."""


class RemoteServer:
    """url: the base of the OpenAI routes, such as http://localhost:8000/v1. model: None means the
    first one that the server lists. patience_s: how long to wait for a server whose model is
    loading."""

    def __init__(
        self, url: str, api_key: str | None, model: str | None, *, patience_s: float = LOADING_S
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PegboardError(f"--url {url!r}: expected something like http://localhost:8000/v1")
        self.url = url.rstrip("/")
        self._parts = parts
        self._patience_s = patience_s
        self._has_told = False
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        with _closing(self._request("GET", "/models", None)) as response:
            models = json.loads(response.read()).get("data", [])
        if not models:
            raise PegboardError(f"{self.url} serves no model")
        return str(models[0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST `body` and yield the events of the answer."""
        with _closing(
            self._request("POST", path, {**body, "model": self.model, "stream": True})
        ) as response:
            for line in response:
                text = line.decode("utf-8").strip()
                if not text.startswith("data:"):
                    continue
                data = text.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise PegboardError(f"{self.url}: {_message(event)}")
                yield event

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        """Send a request. While the server says that its model is loading, wait and try again.
        Raises PegboardError."""
        deadline = time.monotonic() + self._patience_s
        while (answer := self._request_once(method, path, body)) is None:
            if time.monotonic() >= deadline:
                raise PegboardError(
                    f"{self.url}: the model is still loading after {self._patience_s:.0f} s"
                )
            if not self._has_told:
                print(
                    f"{self.url}: the model is loading, waiting for it", file=sys.stderr, flush=True
                )
            self._has_told = True
            time.sleep(INTERVAL_S)
        return answer

    def _request_once(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse | None:
        """Send a request. Returns None if the model is still loading. Raises PegboardError."""
        make = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = make(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        payload = None if body is None else json.dumps(body)
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, payload, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise PegboardError(
                f"cannot reach {self.url}: {error}; is the server running?"
            ) from error
        if response.status != 200:
            text = response.read().decode("utf-8", "replace")
            connection.close()
            if response.status == 503 and "loading" in _error_text(text):
                return None
            raise PegboardError(f"{self.url}{path} answered {response.status}: {_error_text(text)}")
        return response


class _closing:
    """Close the response and its connection, even when the reader stops before the end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def __enter__(self) -> http.client.HTTPResponse:
        return self._response

    def __exit__(self, *exc_info: object) -> None:
        self._response.close()


def _error_text(text: str) -> str:
    try:
        return _message(json.loads(text))
    except ValueError:
        return text[:200]


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
