"""Named entities: {"text": "…"} → [{"type": "PER", "text": "Ada Lovelace", "score": 0.99}, …].

Adjacent tokens of one type are one entity. A label `B-…` begins a new one, and `O` is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegboard.data.output import RequestOutput
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.io_processor import IOProcessorSetup


class EntityProcessor:
    """Implements `pegboard.interfaces.io_processor.IOProcessor`."""

    def __init__(self, options: None, setup: IOProcessorSetup) -> None:
        self._labels = setup.labels
        self._tokenizer = setup.tokenizer

    def prompts(self, data: Any) -> list[tuple[Prompt, PoolingParams]]:
        """See `IOProcessor.prompts`."""
        text = data.get("text") if isinstance(data, dict) else None
        if not isinstance(text, str) or not text:
            raise RequestError('data: expected {"text": a text}', parameter="data")
        return [(Prompt(text=text), PoolingParams(task="token_classify"))]

    def answer(self, data: Any, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """See `IOProcessor.answer`."""
        (output,) = outputs
        entities: list[dict[str, Any]] = []
        ids: list[list[int]] = []
        last = ""
        for token_id, values in zip(output.prompt_token_ids or (), output.pooled(), strict=True):
            best = int(values.argmax())
            begins, _, kind = self._labels[best].rpartition("-")
            score = float(values[best])
            if kind == "O":
                last = ""
                continue
            if kind != last or begins == "B":
                entities.append({"type": kind, "score": score})
                ids.append([])
            ids[-1].append(token_id)
            entities[-1]["score"] = min(score, entities[-1]["score"])
            last = kind
        tokenizer = self._tokenizer()
        for entity, tokens in zip(entities, ids, strict=True):
            entity["text"] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
        return entities
