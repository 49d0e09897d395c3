"""Reasoning of Holo2: `…</think>answer`, unless `thinking` is switched off.

https://huggingface.co/Hcompany/Holo2-8B: the template opens the reasoning in the prompt, or closes
it with `thinking` off.
"""

from __future__ import annotations

from pegboard_chat.parsing import SwitchedReasoning


class Holo2ReasoningParser(SwitchedReasoning):
    """The markers are `<think>` and `</think>`."""
