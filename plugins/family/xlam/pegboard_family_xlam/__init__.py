"""xLAM: tool calls as a JSON list, bare or fenced."""
