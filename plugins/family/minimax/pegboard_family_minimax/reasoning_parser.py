"""Reasoning of MiniMax-M2, which the template opens in the prompt: `…</think>answer`.

https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/vllm_deploy_guide.md. The model expects
its reasoning back in the next turn ("interleaved thinking"). For clients without a field for
reasoning, `minimax_m2_append_think` returns it as part of the content.
"""

from __future__ import annotations

from pegboard.interfaces.output_parser import Content
from pegboard_chat.parsing import Steps, StreamParser, TaggedReasoning

START = "<think>"
END = "</think>"


class MiniMaxM2ReasoningParser(TaggedReasoning):
    start = START
    end = END
    begins_inside = True


class MiniMaxM2AppendThinkReasoningParser(StreamParser):
    """Everything is content, including the start tag that the prompt contains."""

    def reasoning_end(self) -> tuple[str, ...]:
        return (END,)

    def read(self) -> Steps[None]:
        prompt = self.setup.prompt_end.rstrip() if self.setup else ""
        if prompt.endswith(START) and (yield from self.text.peek()):
            yield Content(START)
