"""Looks names up in a table, which is read again for every lookup. So a new version of an adapter
is a changed line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.errors import ModelError
from pegboard.interfaces.lora_resolver import LoRAResolverSetup

if TYPE_CHECKING:
    from pegboard_lora_resolver_table.options import TableOptions


class TableResolver:
    """Returns the folder that the table names. A client can only choose among the names in it."""

    def __init__(self, options: TableOptions, setup: LoRAResolverSetup) -> None:
        self._file = options.file.expanduser().resolve()

    async def resolve(self, name: str) -> Path | None:
        # reading a file blocks, so it is done in a thread
        return await asyncio.to_thread(self._find, name)

    def _find(self, name: str) -> Path | None:
        try:
            table = json.loads(self._file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"the table of adapters cannot be read: {error}") from error
        if name not in table:
            return None
        folder = self._file.parent / table[name]
        if not folder.is_dir():
            raise ModelError(f"the table of adapters names a folder that is not there: {folder}")
        return folder
