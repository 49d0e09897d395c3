"""Tool parsers in vLLM's form whose streaming methods do something."""

import json

from vllm.entrypoints.openai.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.tool_parsers import ToolParser, ToolParserManager


class Tagged(ToolParser):
    """<call>NAME {"x": 1}</call>, any number of times, after the content."""

    def extract_tool_calls(self, model_output, request):
        content, *texts = model_output.split("<call>")
        calls = []
        for text in texts:
            name, _, arguments = text.removesuffix("</call>").partition(" ")
            calls.append(ToolCall(function=FunctionCall(name=name, arguments=arguments)))
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=content or None
        )


@ToolParserManager.register_module("streamer")
class Streamer(Tagged):
    """Streams the name, and the arguments as they come."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.num_read = 0

    def extract_tool_calls_streaming(
        self, previous_text, current_text, delta_text, previous_ids, current_ids, ids, request
    ):
        assert previous_text + delta_text == current_text
        assert [*previous_ids, *ids] == [*current_ids]
        content = ""
        calls = []
        rest = current_text[self.num_read :]
        while rest:
            marks = ("</call>",) if self.current_tool_name_sent else ("<call>",)
            place, mark = next(((rest.find(m), m) for m in marks if m in rest), (None, ""))
            if place is None:
                held = max(n for n in range(8) if n == 0 or rest.endswith(marks[0][:n]))
                text = rest[: len(rest) - held]
            else:
                text = rest[:place]
            if not self.current_tool_name_sent:
                content += text
            elif text:
                function = DeltaFunctionCall(arguments=text).model_dump(exclude_none=True)
                calls.append(DeltaToolCall(index=self.current_tool_id, function=function))
            if place is None:
                self.num_read += len(text)
                break
            self.num_read += len(text) + len(mark)
            rest = rest[len(text) + len(mark) :]
            if mark == "</call>":
                self.current_tool_name_sent = False
                continue
            name, space, _ = rest.partition(" ")
            if not space:
                self.num_read -= len(mark)
                break
            self.num_read += len(name) + 1
            rest = rest[len(name) + 1 :]
            self.current_tool_id += 1
            self.current_tool_name_sent = True
            calls.append(
                DeltaToolCall(
                    index=self.current_tool_id,
                    id=f"call-{self.current_tool_id}",
                    type="function",
                    function=DeltaFunctionCall(name=name),
                )
            )
        if content or calls:
            return DeltaMessage(content=content or None, tool_calls=calls)
        return None


@ToolParserManager.register_module("fails")
class Fails(Tagged):
    """Its streaming method fails at the first call."""

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, *more):
        if "<" in current_text:
            return json.loads(current_text)
        return DeltaMessage(content=delta_text)


@ToolParserManager.register_module("differs")
class Differs(Tagged):
    """It streams something else than the answer."""

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, *more):
        return DeltaMessage(content=delta_text.upper())
