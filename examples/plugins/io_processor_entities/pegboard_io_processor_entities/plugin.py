"""The spec of the IO processor `entities`. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.io_processor import IOProcessorSpec

ENTITIES = IOProcessorSpec(
    api="1.0", implementation="pegboard_io_processor_entities.processor:EntityProcessor"
)
