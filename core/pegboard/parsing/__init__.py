"""What output parsers share: finding markers in streamed text, folding events into a message, one parser behind another.

Public for plugins of the kinds `reasoning_parser` and `tool_parser`; standard library only.
"""

from pegboard.parsing.markers import MarkerScanner
from pegboard.parsing.message import Message, ToolCall, fold
from pegboard.parsing.pipeline import Pipeline

__all__ = ["MarkerScanner", "Message", "Pipeline", "ToolCall", "fold"]
