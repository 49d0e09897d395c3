"""The api `lora_admin`: adapters are loaded and unloaded while the server runs, with vLLM's routes,
bodies and messages. It runs only when enabled, because its clients choose which files of this
machine are read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.interfaces.api import ApiSetup
from pegboard_api_admin.bodies import described, read_body
from pegboard_api_admin.errors import error_body
from pegboard_api_admin.folders import named, resolved
from pegboard_api_admin.options import LoRAOptions

INVALID = "InvalidUserInput"
NOT_FOUND = "NotFoundError"


class LoadBody(BaseModel):
    """Body of POST /v1/load_lora_adapter. load_inplace: replace an adapter of the same name."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadBody(BaseModel):
    """Body of POST /v1/unload_lora_adapter. lora_int_id: if given, it must be the adapter's."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = ""
    lora_int_id: int | None = None


class LoRAApi:
    """POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter."""

    def __init__(self, options: LoRAOptions, setup: ApiSetup) -> None:
        self._client = setup.client
        self._directories = resolved(options.directories)

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/v1/load_lora_adapter", described(self._load, LoadBody), methods=["POST"]),
            Route("/v1/unload_lora_adapter", described(self._unload, UnloadBody), methods=["POST"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _load(self, http: Request) -> Response:
        """Load a LoRA adapter from a folder of the server's machine."""
        body = read_body(await http.body(), LoadBody)
        name = body.lora_name
        if not name or not body.lora_path:
            return _refused(400, "Both 'lora_name' and 'lora_path' must be provided.", INVALID)
        if not body.load_inplace and self._is_adapter(name):
            message = "If you want to load the adapter in place, set 'load_inplace' to True."
            return _refused(
                400, f"The lora adapter '{name}' has already been loaded. {message}", INVALID
            )
        folder = await asyncio.to_thread(named, body.lora_path, self._directories)
        if folder is None or not folder.is_dir():
            return _refused(
                404, f"Loading lora {name} failed: No adapter found for {body.lora_path}", NOT_FOUND
            )
        await self._client.control(
            "load_lora_adapter", name=name, path=body.lora_path, load_inplace=body.load_inplace
        )
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, http: Request) -> Response:
        """Unload a LoRA adapter. Requests that use it are finished first."""
        body = read_body(await http.body(), UnloadBody)
        name = body.lora_name
        if not name:
            return _refused(
                400, "'lora_name' needs to be provided to unload a LoRA adapter.", INVALID
            )
        adapter = await self._client.adapter(name) if self._is_adapter(name) else None
        is_there = adapter is not None and body.lora_int_id in (None, adapter.lora_int_id)
        if not is_there or not await self._client.control("unload_lora_adapter", name=name):
            return _refused(404, f"The lora adapter '{name}' cannot be found.", NOT_FOUND)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _is_adapter(self, name: str) -> bool:
        return any(
            model.name == name and model.parent is not None for model in self._client.models()
        )


def _refused(status: int, message: str, kind: str) -> Response:
    shown = message if len(message) <= 2000 else f"{message[:1999]}…"
    return JSONResponse(
        {"error": {"message": shown, "type": kind, "param": None, "code": status}}, status
    )
