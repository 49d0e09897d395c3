"""The common parts of output parsers: reading streamed text, folding events into a message, and
running one parser after another.

Plugins of the kinds `reasoning_parser` and `tool_parser` may use it. It needs only the standard
library. Parsing takes time linear in the length of the text. The result does not depend on how the
text is cut into pieces.
"""

from pegboard_chat.parsing.call_constraint import (
    call_bodies,
    call_list,
    constrained_calls,
    constrained_lists,
)
from pegboard_chat.parsing.call_parsers import JSONToolParser, TaggedToolParser
from pegboard_chat.parsing.coercion import coerce, parameter_types
from pegboard_chat.parsing.json_calls import (
    CallKeys,
    read_arguments,
    read_call_list,
    read_call_object,
)
from pegboard_chat.parsing.json_text import stream_json, take_json
from pegboard_chat.parsing.literal_constraint import (
    Notation,
    constrained_objects,
    constrained_python_lines,
    constrained_python_lists,
)
from pegboard_chat.parsing.markers import Markers, MarkerScanner, Stops
from pegboard_chat.parsing.message import Message, ToolCall, fold, merged
from pegboard_chat.parsing.pipeline import Pipeline
from pegboard_chat.parsing.python_text import read_python_call, read_python_calls, stream_python
from pegboard_chat.parsing.reader import Steps, TextReader, collected
from pegboard_chat.parsing.reasoning import SwitchedReasoning, TaggedReasoning
from pegboard_chat.parsing.stream_parser import Calls, StreamParser
from pegboard_chat.parsing.tag_constraint import constrained_tags
from pegboard_chat.parsing.tags import TagFormat, read_tagged_call

__all__ = [
    "CallKeys",
    "Calls",
    "JSONToolParser",
    "MarkerScanner",
    "Markers",
    "Message",
    "Notation",
    "Pipeline",
    "Steps",
    "Stops",
    "StreamParser",
    "SwitchedReasoning",
    "TagFormat",
    "TaggedReasoning",
    "TaggedToolParser",
    "TextReader",
    "ToolCall",
    "call_bodies",
    "call_list",
    "coerce",
    "collected",
    "constrained_calls",
    "constrained_lists",
    "constrained_objects",
    "constrained_python_lines",
    "constrained_python_lists",
    "constrained_tags",
    "fold",
    "merged",
    "parameter_types",
    "read_arguments",
    "read_call_list",
    "read_call_object",
    "read_python_call",
    "read_python_calls",
    "read_tagged_call",
    "stream_json",
    "stream_python",
    "take_json",
]
