"""Runs vLLM's own output parsers, in an interpreter that has vLLM: jobs as lines of JSON on stdin,
results as lines of JSON on stdout.

Job: {"kind", "name", "tokens": [markers that are one token each], "examples": [{"text", "tools",
"template_kwargs", "prompt_end"}]}.
Result per example: {"whole": message, "stream": message}, or {"error": text} instead of a message;
message = {"content", "reasoning", "calls": [[name, arguments text]]}. Not imported by Pegboard.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def make_tokenizer(markers: list[str]) -> Any:
    """A vocabulary with bytes as tokens, and each marker as one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({character: index for index, character in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(marker, normalized=False, special=False) for marker in markers]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False
    )


def parser_class(kind: str, name: str) -> Any:
    from vllm.parser.parser_manager import ParserManager

    if kind == "tool_parser":
        return ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
    return ParserManager.get_parser(reasoning_parser_name=name)


class Job:
    def __init__(self, job: dict[str, Any]) -> None:
        self.tokenizer = make_tokenizer(job["tokens"])
        self.parser_class = parser_class(job["kind"], job["name"])
        self.has_tools = job["kind"] == "tool_parser"

    def parser_and_request(self, example: dict[str, Any]) -> tuple[Any, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        tools = {"tools": example["tools"], "tool_choice": "auto"} if self.has_tools else {}
        request = ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            chat_template_kwargs=example["template_kwargs"],
            **tools,
        )
        parser = self.parser_class(
            self.tokenizer, request.tools, chat_template_kwargs=example["template_kwargs"]
        )
        return parser, parser.adjust_request(request)

    def whole(self, example: dict[str, Any]) -> dict[str, Any]:
        parser, request = self.parser_and_request(example)
        parser.set_prompt_token_ids(self.ids(example["prompt_end"]))
        ids = self.ids(example["text"])
        reasoning, content, calls = parser.parse(
            example["text"], request, enable_auto_tools=self.has_tools, model_output_token_ids=ids
        )
        found = [[call.name, call.arguments] for call in calls or ()]
        return {"content": content or "", "reasoning": reasoning or "", "calls": found}

    def stream(self, example: dict[str, Any]) -> dict[str, Any]:
        """Parses token by token, like the server."""
        parser, request = self.parser_and_request(example)
        ids = self.ids(example["text"])
        prompt = self.ids(example["prompt_end"])
        parser.set_prompt_token_ids(prompt)
        message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
        pending: list[int] = []
        for place, token in enumerate(ids):
            pending.append(token)
            text = self.tokenizer.decode(pending, skip_special_tokens=False)
            is_last = place == len(ids) - 1
            if text.endswith("\ufffd") and not is_last:
                continue
            delta = parser.parse_delta(text, pending, request, prompt, finished=is_last)
            pending = []
            self.add(message, delta)
        return message

    @staticmethod
    def add(message: dict[str, Any], delta: Any) -> None:
        if delta is None:
            return
        message["content"] += delta.content or ""
        message["reasoning"] += delta.reasoning or ""
        for call in delta.tool_calls or ():
            while len(message["calls"]) <= call.index:
                message["calls"].append(["", ""])
            if call.function is not None:
                message["calls"][call.index][0] += call.function.name or ""
                message["calls"][call.index][1] += call.function.arguments or ""

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class HarmonyJob:
    """The parsers of gpt-oss: the harmony library, which vLLM's own parsers call, on the model's
    own token ids."""

    def __init__(self, job: dict[str, Any]) -> None:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        self.encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)

    def whole(self, example: dict[str, Any]) -> dict[str, Any]:
        from openai_harmony import Role

        ids = self.encoding.encode(example["text"], allowed_special="all")
        return self.message(
            self.encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
        )

    def stream(self, example: dict[str, Any]) -> dict[str, Any]:
        from openai_harmony import Author, Message, Role, StreamableParser

        parser = StreamableParser(self.encoding, Role.ASSISTANT)
        for token in self.encoding.encode(example["text"], allowed_special="all"):
            parser.process(token)
        messages = list(parser.messages)
        if parser.current_content:
            open_one = Message.from_author_and_content(
                Author.new(Role.ASSISTANT, ""), parser.current_content
            )
            open_one.channel = parser.current_channel
            open_one.recipient = parser.current_recipient
            messages.append(open_one)
        return self.message(messages)

    @staticmethod
    def message(parts: list[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
        for part in parts:
            text = "".join(content.text for content in part.content)
            if part.recipient is not None:
                found["calls"].append([part.recipient.removeprefix("functions."), text])
            elif part.channel == "analysis":
                found["reasoning"] += text
            else:
                found["content"] += text
        return found


def attempt(read: Any, example: dict[str, Any]) -> dict[str, Any]:
    try:
        return read(example)
    except Exception as error:  # noqa: BLE001 - the peer's failure is a result to be shown
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    stdout = sys.stdout
    sys.stdout = sys.stderr  # anything printed meanwhile is not a result
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        given = json.loads(line)
        job = (HarmonyJob if given["name"] in ("openai", "openai_gptoss") else Job)(given)
        results = [
            {"whole": attempt(job.whole, example), "stream": attempt(job.stream, example)}
            for example in given["examples"]
        ]
        print(json.dumps(results), file=stdout, flush=True)


if __name__ == "__main__":
    main()
