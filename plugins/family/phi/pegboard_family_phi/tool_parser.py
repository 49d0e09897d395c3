"""Tool calls of Microsoft Phi-4-mini: a JSON list behind a marker.

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, …]
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, …]<|/tool_call|>

Formats: https://github.com/microsoft/PhiCookBook (function calling with Phi-4-mini), and the special tokens in
https://huggingface.co/microsoft/Phi-4-mini-instruct. Which of them a model writes depends on its prompt.
"""

from __future__ import annotations

from pegboard.parsing import Markers, Steps, StreamParser, read_call_list

STARTS = Markers("functools", "<|tool_call|>")
END = "<|/tool_call|>"


class Phi4MiniToolParser(StreamParser):
    def read(self) -> Steps[None]:
        while marker := (yield from self.prose(STARTS)):
            yield from self.attempt(self._calls(marker))

    def _calls(self, marker: str) -> Steps[bool]:
        yield from self.text.space()
        if not (yield from read_call_list(self.text, self.calls)):
            return False
        if marker != "functools":
            self.text.forget()
            yield from self.text.closing(END)
        return True
