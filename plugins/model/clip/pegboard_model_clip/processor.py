"""Makes of an image what CLIP and SigLIP compute with, and pads SigLIP's texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    PlacedItem,
    Placeholder,
    Processed,
)
from pegboard_model_clip.sizes import (
    KIND,
    SIGLIP_KIND,
    SIGLIP_PADDING,
    SIGLIP_TEXT,
    TextSizes,
    check_siglip,
    vision_sizes,
)
from pegboard_models.processing import (
    ImageProcessor,
    folder_of,
    json_object,
    square_pixels,
    token_id,
)

if TYPE_CHECKING:
    from PIL.Image import Image


class ClipProcessor:
    """An image is one token, in the place of those that an empty text has."""

    name = "CLIP"
    kind = KIND

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        self.size = vision_sizes(setup.checkpoint.config, self.kind).image_size
        self.empty = tuple(setup.tokenizer.encode("", add_special_tokens=True))
        self.images = ImageProcessor(setup.checkpoint)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("", self.empty, is_first=True)

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [3, size, size]."""
        pixels = square_pixels(self.images([value], options)["pixel_values"][0], self.size)
        return Processed([self.empty[0] if self.empty else 0], {"pixel_values": pixels})

    def inputs(
        self, token_ids: Sequence[int], items: Sequence[PlacedItem]
    ) -> Mapping[str, Sequence[int]]:
        """Check that a prompt is a text or an image. Raises RequestError. The model has no inputs
        beside tokens."""
        if items and len(token_ids) > 1:
            raise RequestError(
                f"the prompt has {len(items)} images and {len(token_ids) - len(items)} tokens of "
                f"text; {self.name} makes a vector of one image, with an empty text, or of a text",
                parameter="multi_modal_data",
            )
        return {}


class SiglipProcessor(ClipProcessor):
    """Texts are padded to one length, because SigLIP has learned that and attends to all of it."""

    name = "SigLIP"
    kind = SIGLIP_KIND

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(options, setup)
        config = setup.checkpoint.config
        check_siglip(config)
        self.length = TextSizes.of(config, SIGLIP_TEXT).max_position_embeddings
        path = folder_of(setup.checkpoint) / "tokenizer_config.json"
        values = json_object(path) if path.is_file() else {}
        self.padding = padding_of(config, values, setup)
        side = values.get("padding_side", "right")
        if side not in ("left", "right"):
            raise ModelError(f"{path} has padding_side={side!r}; expected 'left' or 'right'")
        self.pads_end = side == "right"

    def padded(self, token_ids: Sequence[int]) -> Sequence[int]:
        padding = [self.padding] * (self.length - len(token_ids))
        return [*token_ids, *padding] if self.pads_end else [*padding, *token_ids]


def padding_of(
    config: Mapping[str, Any], values: Mapping[str, Any], setup: MultiModalProcessorSetup
) -> int:
    """Return the id of the token that texts are padded with: that of the tokenizer, or that of the
    text_config. values: of tokenizer_config.json. Raises ModelError."""
    named = values.get("pad_token")
    text = named.get("content") if isinstance(named, Mapping) else named
    if isinstance(text, str):
        return token_id(setup.tokenizer, text)
    token = (config.get("text_config") or {}).get("pad_token_id", SIGLIP_PADDING)
    if type(token) is not int or token < 0:
        raise ModelError(
            f"the checkpoint's text_config has pad_token_id={token!r}, and tokenizer_config.json "
            "has no pad_token; expected the id of a token"
        )
    return token
