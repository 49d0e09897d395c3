"""Makes of an image what a transformers model computes with, by the processor of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_models.processing import folder_of, token_of

if TYPE_CHECKING:
    from PIL.Image import Image

TEXT = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Outputs of a processor that are about text."""
FORMS = frozenset(
    {
        "audio_kwargs",
        "data_format",
        "device",
        "disable_grouping",
        "images_kwargs",
        "input_data_format",
        "return_mm_token_type_ids",
        "return_tensors",
        "return_text_replacement_offsets",
        "text_kwargs",
        "videos_kwargs",
    }
)
"""Arguments of processors that are not about the image."""


class TransformersProcessor:
    """Each image is processed as the only one of a prompt."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        from transformers import AutoProcessor

        folder = folder_of(setup.checkpoint)
        try:
            self.inner: Any = AutoProcessor.from_pretrained(
                str(folder), backend="pil", local_files_only=True
            )
        except Exception as error:  # the classes of processors raise anything
            raise ModelError(f"{folder}: the processor cannot be loaded: {error}") from error
        self.mark = getattr(self.inner, "image_token", None)
        if not isinstance(self.mark, str):
            raise ModelError(
                f"{folder}: {type(self.inner).__name__} has no image_token; the model needs its "
                "own plugin for images"
            )
        default = getattr(self.inner, "image_token_id", None)
        self.token = token_of(setup.checkpoint.config, "image", default)
        self.tokens = tuple(setup.tokenizer.encode(self.mark, add_special_tokens=False))
        kinds = self.inner.valid_processor_kwargs, self.inner.image_processor.valid_kwargs
        self.names = frozenset(name for kind in kinds for name in kind.__annotations__) - FORMS

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(self.mark, self.tokens)

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The arrays are those of the processor, but without what is about text."""
        if unknown := sorted({*options} - self.names):
            raise RequestError(
                f"mm_processor_kwargs has {', '.join(unknown)}; {type(self.inner).__name__} takes "
                f"{', '.join(sorted(self.names))}",
                parameter="mm_processor_kwargs",
            )
        try:
            output = self.inner(
                text=[self.mark],
                images=[value],
                add_special_tokens=False,
                return_tensors="np",
                **options,
            )
            arrays = {name: np.asarray(item) for name, item in output.items() if name not in TEXT}
            tokens = np.asarray(output["input_ids"])[0]
        except Exception as error:  # the classes of processors raise anything
            how = f" with {dict(options)}" if options else ""
            raise RequestError(
                f"the image could not be processed{how}: {error}",
                parameter="mm_processor_kwargs" if options else None,
            ) from error
        if wrong := sorted(name for name, array in arrays.items() if array.dtype.hasobject):
            raise RequestError(f"the processor makes {wrong[0]} of parts with different sizes")
        is_row = tokens == self.token
        if not is_row.any():
            raise RequestError("the processor makes no tokens of the image")
        return Processed(tokens.tolist(), arrays, is_row)
