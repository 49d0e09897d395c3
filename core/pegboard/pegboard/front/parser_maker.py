"""Makes a request's output parsers, and asks the reasoning parser where the reasoning of an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegboard.interfaces.output_parser import OutputParser, OutputParserSetup

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

SPECIAL_TOKENS = "special_tokens"
"""Flag of a parser that reads special tokens."""

PROMPT_END_TOKENS = 64
"""How much of the prompt's end a parser sees."""


@dataclass(frozen=True, slots=True)
class ParserMaker:
    """A chosen parser. make: builds one for a completion. reads_special: its markers are special tokens."""

    name: str
    make: Callable[[OutputParserSetup], OutputParser]
    reads_special: bool = False

    @classmethod
    def chosen(cls, registry: "Registry", kind: str, name: str | None) -> "ParserMaker | None":
        """The installed parser `name`; None stays None."""
        if name is None:
            return None
        entry = registry.find(kind, name)
        registry.load(entry)  # now, so that a broken one shows at the start and not in the first request
        return cls(entry.name, lambda setup: registry.build(entry, setup), SPECIAL_TOKENS in registry.spec(entry).flags)


def parser_setup(
    tokenizer: "Tokenizer",
    prompt_token_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> OutputParserSetup:
    """What a parser is told about the answer to this prompt."""
    end = tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return OutputParserSetup(tokenizer.vocabulary(), tuple(tools), template_kwargs or {}, end)


class PromptReasoning:
    """Where structured output may begin behind a prompt that is no chat: what ends its reasoning, as token ids.

    As in vLLM, only for a parser that the user has named: then every prompt is taken for one whose answer reasons, unless its end
    says otherwise. The parser that a model family recommends is for chats.
    """

    def __init__(self, maker: ParserMaker, tokenizer: "Tokenizer") -> None:
        self._maker = maker
        self._tokenizer = tokenizer

    @classmethod
    def of_plan(cls, plan: "EnginePlan", registry: "Registry | None", tokenizer: "Tokenizer | None") -> "PromptReasoning | None":
        """None where prompts are constrained from the first token on."""
        if registry is None or tokenizer is None or plan.settings.engine.reasoning_parser == "auto":
            return None
        maker = ParserMaker.chosen(registry, "reasoning_parser", plan.reasoning_parser)
        return cls(maker, tokenizer) if maker is not None else None

    def ends(self, prompt_token_ids: Sequence[int]) -> list[list[int]]:
        """Token ids of the texts, any of which ends the reasoning."""
        parser = self._maker.make(parser_setup(self._tokenizer, prompt_token_ids))
        return [self._tokenizer.encode(end, add_special_tokens=False) for end in parser.reasoning_end()]
