"""Tool calls of AI21 Jamba 1.5 and later: a JSON list between special tokens.

    <tool_calls>[
      {"name": "get_weather", "arguments": {"city": "Paris"}}
    ]</tool_calls>

Format: https://huggingface.co/ai21labs/AI21-Jamba-Mini-1.5#tool-use-with-jamba.
"""

from __future__ import annotations

from pegboard.parsing import Markers, Steps, StreamParser, read_call_list

START = Markers("<tool_calls>")
END = "</tool_calls>"


class JambaToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while (yield from self.prose(START)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps[bool]:
        yield from self.text.space()
        if not (yield from read_call_list(self.text, self.calls)):
            return False
        self.text.forget()
        yield from self.text.closing(END)
        return True
