"""Chat templates and incremental decoding for tokenizer plugins, and `pegboard_chat.chats` for API
plugins. The package is part of the public surface. Its import needs only the standard library.
jinja2 is imported when the first template is compiled.
"""

from __future__ import annotations

from pegboard_chat.chat_template import ChatTemplate, named_templates
from pegboard_chat.text_stream import ByteTextStream, OffsetTextStream
from pegboard_chat.transformers_methods import TransformersMethods

__all__ = [
    "ByteTextStream",
    "ChatTemplate",
    "OffsetTextStream",
    "TransformersMethods",
    "named_templates",
]
