"""`pegboard chat`: a conversation with a running server, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pegboard.cli.remote_server import RemoteServer, converse, make_parser, show


def main(argv: Sequence[str]) -> int:
    """One message with --quick, else a conversation until end of input."""
    parser = make_parser("chat", "Chat with a running server.")
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the conversation starts with")
    arguments = parser.parse(argv)
    server = RemoteServer(arguments.url, arguments.api_key, arguments.model_name)
    messages: list[dict[str, Any]] = []
    if arguments.system_prompt:
        messages.append({"role": "system", "content": arguments.system_prompt})
    limit = {} if arguments.max_tokens is None else {"max_completion_tokens": arguments.max_tokens}

    def answer(text: str) -> None:
        messages.append({"role": "user", "content": text})
        try:
            reply = show(_pieces(server.stream("/chat/completions", {"messages": messages, **limit})))
        except BaseException:
            messages.pop()  # the conversation goes on as if it had not been asked
            raise
        messages.append({"role": "assistant", "content": reply})

    if arguments.quick is not None:
        answer(arguments.quick)
        return 0
    return converse(answer)


def _pieces(events: Iterator[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            yield delta.get("reasoning") or delta.get("reasoning_content") or ""
            yield delta.get("content") or ""
