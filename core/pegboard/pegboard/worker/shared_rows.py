"""Rows of images, audio and video that engines share through an encoder connector."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import msgspec
from torch import Tensor

from pegboard.data.media import MediaItem
from pegboard.interfaces.encoder_connector import EncoderConnector, EncoderConnectorSetup
from pegboard.interfaces.spec import Need
from pegboard.log import get_logger
from pegboard.worker.loaded_model import LoadedModel

log = get_logger(__name__)


class SharedRows:
    """The rows of one model, whose weights may change. A connector that fails is not asked again,
    because no answer depends on it."""

    def __init__(self, connector: EncoderConnector, plugin: str, loaded: LoadedModel) -> None:
        self.connector = connector
        self.plugin = plugin
        self.loaded = loaded
        self.is_off = False
        self.unknown = os.urandom(16).hex()

    def load(self, item: MediaItem) -> Tensor | None:
        """Return the rows of an item, if another engine has made them."""
        rows = self._call("load", self._name(item))
        if rows is None:
            return None
        if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != item.num_rows:
            shown = [*rows.shape] if isinstance(rows, Tensor) else type(rows).__name__
            self._switch_off("load", f"it returned {shown} for {item.num_rows} rows")
            return None
        return rows

    def save(self, item: MediaItem, rows: Tensor) -> None:
        """Give rows to the other engines."""
        if not self.loaded.setup.place.rank:
            self._call("save", self._name(item), rows)

    def _call(self, method: str, *args: object) -> Any:
        if self.is_off:
            return None
        try:
            return getattr(self.connector, method)(*args)
        except Exception as error:  # noqa: BLE001 - of a plugin
            self._switch_off(method, f"{type(error).__name__}: {error}")
            return None

    def _switch_off(self, method: str, reason: str) -> None:
        self.is_off = True
        log.warning(
            "%s failed in %s and is off for the rest of the run: %s", self.plugin, method, reason
        )

    def _name(self, item: MediaItem) -> str:
        config = self.loaded.setup.config
        weights = self.loaded.received or self.loaded.checkpoint.digest or self.unknown
        parts = [weights, config.dtype, config.quantization, item.modality, item.digest]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def make_shared_rows(loaded: LoadedModel) -> SharedRows | None:
    """Build the configured encoder connector."""
    setup = loaded.setup
    name = setup.config.encoder_connector
    if name is None:
        return None
    decision = setup.registry.choose("encoder_connector", Need(), explicit=name)
    connector_setup = EncoderConnectorSetup(setup.device.name, setup.place.rank)
    entry = decision.require()
    return SharedRows(setup.registry.build(entry, connector_setup), entry.id, loaded)
