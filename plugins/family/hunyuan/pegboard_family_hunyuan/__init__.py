"""Hunyuan: tool calls as a list between tags, reasoning and answer between tags."""
