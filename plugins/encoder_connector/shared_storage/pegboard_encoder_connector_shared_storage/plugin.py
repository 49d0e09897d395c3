"""Spec of the encoder connector `shared_storage`."""

from __future__ import annotations

from pegboard.interfaces.encoder_connector import EncoderConnectorSpec

SHARED_STORAGE = EncoderConnectorSpec(
    api="1.0",
    implementation="pegboard_encoder_connector_shared_storage.connector:SharedStorageConnector",
    options="pegboard_encoder_connector_shared_storage.options:SharedStorageOptions",
)
