"""`data:` URLs (RFC 2397)."""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote_to_bytes

from pegboard_media.limits import MAX_BYTES, Unusable

HEADER = re.compile(
    r"(?:[\w!#$&^.+-]+/[\w!#$&^.+-]+)?(?:;[\w!#$&^.+-]+=[^;,]*)*(;base64)?",
    re.ASCII | re.IGNORECASE,
)
MAX_HEADER_CHARS = 1024


def read_data_url(url: str) -> bytes:
    """Return the bytes that a data: URL holds. Its media type must be well formed and is not
    used."""
    comma = url.find(",", 0, MAX_HEADER_CHARS)
    header = HEADER.fullmatch(url[len("data:") : comma]) if comma >= 0 else None
    if header is None:
        raise Unusable("is not a data: URL; expected data:<type>/<subtype>;base64,<data>")
    if len(url) - comma > 3 * MAX_BYTES:
        raise Unusable(f"is larger than {MAX_BYTES} bytes")
    content = unquote_to_bytes(url[comma + 1 :])
    if header[1]:
        try:
            content = binascii.a2b_base64(content, strict_mode=True)
        except binascii.Error as error:
            raise Unusable("has data that is not base64") from error
    if len(content) > MAX_BYTES:
        raise Unusable(f"is larger than {MAX_BYTES} bytes")
    return content
