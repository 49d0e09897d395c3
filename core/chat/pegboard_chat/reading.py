"""From outputs to events: what an answer's text says, read by the model's parsers, for every front alike.

The whole answer and the stream go through the same code: a whole answer is a stream of one output.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields

from pegboard.data.output import RequestOutput
from pegboard.errors import PegboardError
from pegboard.interfaces.output_parser import Content, Event, Reasoning
from pegboard.interfaces.tokenizer import Tokenizer
from pegboard_chat.parsing import Pipeline


@dataclass(slots=True)
class ParsedOutput(RequestOutput):
    """An output and what its texts say: events by the index of the completion."""

    events: dict[int, list[Event]] = field(default_factory=dict)


_FIELDS = tuple(item.name for item in fields(RequestOutput))


def special_texts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds the texts of the special tokens; None when there are none."""
    ids = sorted(tokenizer.vocabulary().special_token_ids)
    texts = {tokenizer.decode([token], skip_special_tokens=False) for token in ids} - {""}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


async def read_outputs(
    outputs: AsyncIterator[RequestOutput],
    make_pipeline: Callable[[Sequence[int]], Pipeline],
    *,
    hidden: re.Pattern[str] | None = None,
    is_parallel: bool = True,
) -> AsyncGenerator[ParsedOutput, None]:
    """Each output with what it says; closing the result closes `outputs`.

    outputs: each new text (DELTA), or only one (FINAL_ONLY). make_pipeline: the parsers of a completion, given the prompt's token
    ids. hidden: special tokens that are taken out of the text that is left. is_parallel: False drops all calls but the first.
    Raises PegboardError where the engine gave a completion up.
    """
    readers: dict[int, _Completion] = {}
    async with aclosing(outputs):  # type: ignore[type-var]
        async for output in outputs:
            events: dict[int, list[Event]] = {}
            for completion in output.outputs:
                if completion.finish_reason == "error":
                    raise PegboardError(f"request {output.request_id} failed in the engine; the log of the server says why")
                reader = readers.get(completion.index)
                if reader is None:
                    pipeline = make_pipeline(output.prompt_token_ids or ())
                    reader = readers[completion.index] = _Completion(pipeline, hidden, is_parallel=is_parallel)
                is_last = completion.finish_reason is not None
                events[completion.index] = reader.read(completion.text, completion.token_ids, is_last=is_last)
            yield ParsedOutput(**{name: getattr(output, name) for name in _FIELDS}, events=events)


class _Completion:
    """The reading of one completion."""

    def __init__(self, pipeline: Pipeline, hidden: re.Pattern[str] | None, *, is_parallel: bool) -> None:
        self._pipeline = pipeline
        self._hidden = hidden
        self._is_parallel = is_parallel

    def read(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> list[Event]:
        events = self._pipeline.feed(text, token_ids)
        if is_last:
            events = [*events, *self._pipeline.finish()]
        return [kept for event in events if (kept := self._kept(event)) is not None]

    def _kept(self, event: Event) -> Event | None:
        if isinstance(event, Content | Reasoning):
            text = self._hidden.sub("", event.text) if self._hidden else event.text
            return type(event)(text) if text else None
        return event if self._is_parallel or event.index == 0 else None
