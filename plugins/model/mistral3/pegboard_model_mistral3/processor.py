"""Makes of an image what Mistral 3 computes with."""

from __future__ import annotations

from pegboard_models.pixtral_images import PixtralProcessor

IMAGE_TOKEN = 10
MERGED = 2


class Mistral3Processor(PixtralProcessor):
    image_token = IMAGE_TOKEN
    merged = MERGED
