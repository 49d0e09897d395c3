"""From a URL, the bytes of a file or an object to what a multimodal processor takes. The import is
cheap: Pillow and the other decoders are imported when they are used."""

from __future__ import annotations

from pegboard_media.reader import Reader

__all__ = ["Reader"]
