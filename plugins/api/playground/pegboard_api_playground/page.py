"""The api `playground`: GET /playground/ and the files of the page. It runs only when enabled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.interfaces.api import ApiSetup
from pegboard_api_playground.files import FILES, MEDIA_TYPES

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Browsers ask each time whether the file is the same, so the page is never older than the
    # server.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page. etag: a digest of its content, in quotes."""

    content: bytes
    media_type: str
    etag: str


class PlaygroundApi:
    """GET /playground/NAME. A name is looked up in a table of the files that were read at the
    start. No request reaches the file system."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._files = read_files()

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/playground", self._redirect, methods=["GET"]),
            Route("/playground/{name:path}", self._file, methods=["GET"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return {
            "error": {
                "message": message,
                "type": HTTPStatus(status).phrase,
                "param": parameter,
                "code": status,
            }
        }

    async def _redirect(self, request: Request) -> Response:
        """To /playground/. The address is relative, so that it is right below any prefix."""
        return RedirectResponse("playground/", 307, HEADERS)

    async def _file(self, request: Request) -> Response:
        """The page to chat with the model, and its files."""
        file = self._files.get(request.path_params["name"] or "index.html")
        if file is None:
            raise HTTPException(404)
        headers = {**HEADERS, "ETag": file.etag}
        if file.etag in _tags(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def read_files() -> dict[str, File]:
    """Return all files of the page by name."""
    folder = files("pegboard_api_playground") / "static"
    return {name: _file((folder / name).read_bytes(), name) for name in FILES}


def _file(content: bytes, name: str) -> File:
    digest = hashlib.blake2b(content, digest_size=12).hexdigest()
    return File(content, MEDIA_TYPES[name.rpartition(".")[2]], f'"{digest}"')


def _tags(header: str) -> set[str]:
    """Return the tags of If-None-Match. A proxy that compresses marks them as weak."""
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}
