"""LongCat: tool calls as JSON between tags."""
