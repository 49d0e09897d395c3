"""Reads and writes the files.

<shared_storage_path>/<first two digits of the name>/<name>.safetensors
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.encoder_connector import EncoderConnectorSetup
from pegboard.log import get_logger
from pegboard_encoder_connector_shared_storage.options import SharedStorageOptions

log = get_logger(__name__)

ROWS = "rows"
NAME = re.compile(r"[0-9a-f]{1,200}")


class SharedStorageConnector:
    """Implements `pegboard.interfaces.encoder_connector.EncoderConnector`. Raises ConfigError if
    the folder cannot be used."""

    def __init__(self, options: SharedStorageOptions, setup: EncoderConnectorSetup) -> None:
        self._root = options.shared_storage_path.expanduser().absolute()
        self._device = setup.device
        self._saves = options.role != "ec_consumer"
        self._loads = options.role != "ec_producer"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"shared_storage_path: cannot make {self._root}: {error.strerror}; name another "
                "folder"
            ) from error
        if self._saves and not os.access(self._root, os.W_OK):
            raise ConfigError(
                f"shared_storage_path: {self._root} is not writable; allow writing, or set role to "
                "ec_consumer"
            )

    def load(self, name: str) -> Tensor | None:
        """See `EncoderConnector.load`."""
        if not self._loads:
            return None
        path = self._path(name)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        try:
            rows = load(content)[ROWS]
        except (SafetensorError, KeyError, ValueError) as error:
            log.warning("%s is damaged, so the item is encoded again: %s", path, error)
            return None
        return rows.to(self._device)

    def save(self, name: str, rows: Tensor) -> None:
        """See `EncoderConnector.save`."""
        path = self._path(name)
        if not self._saves or path.exists():
            return
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(save({ROWS: rows.contiguous().cpu()}))
            temporary.replace(path)
        except OSError as error:
            log.warning("rows cannot be saved to %s: %s", path, error)
            temporary.unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: `save` has written everything."""

    def _path(self, name: str) -> Path:
        assert NAME.fullmatch(name), f"{name!r} is not a name of rows"
        return self._root / name[:2] / f"{name}.safetensors"
