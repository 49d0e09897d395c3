"""A model that is already bound, for tests of the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pegboard.config.schema import EngineConfig
from pegboard.layers.build import Declared
from pegboard.worker.loaded_model import LoadedModel
from pegboard.worker.parts import Ranks


class BoundModel(LoadedModel):
    """A model without layers. backends: of the KV groups, in order."""

    def __init__(self, model: Any, *backends: Any) -> None:
        self.model = model
        ranks = Ranks()
        build: Any = SimpleNamespace(
            declared=Declared(), lora=None, taps=(), stage=ranks.stage, attention={}
        )
        setup: Any = SimpleNamespace(ranks=ranks, config=EngineConfig())
        attention: Any = SimpleNamespace(
            backends=list(enumerate(backends)),
            not_replayed=lambda pads, trait: "",
            not_in_pieces=lambda: "",
            outside=lambda bound, leave: {},
        )
        self.setup = setup
        self.build = build
        self.attention = attention
