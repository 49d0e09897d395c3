"""For tokenizer plugins: chat templates and incremental decoding. For API plugins: `pegboard_chat.chats`. Part of the public
surface.

Standard library only at import; jinja2 is imported when the first template is compiled.
"""

from __future__ import annotations

from pegboard_chat.chat_template import ChatTemplate, named_templates
from pegboard_chat.text_stream import ByteTextStream, OffsetTextStream

__all__ = ["ByteTextStream", "ChatTemplate", "OffsetTextStream", "named_templates"]
