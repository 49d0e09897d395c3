"""`pegboard complete`: text continued by a running server, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pegboard.cli.remote_server import RemoteServer, converse, make_parser, show


def main(argv: Sequence[str]) -> int:
    """One text with --quick, else every line of the input by itself."""
    parser = make_parser("complete", "Complete text with a running server.")
    arguments = parser.parse(argv)
    server = RemoteServer(arguments.url, arguments.api_key, arguments.model_name)
    limit = {} if arguments.max_tokens is None else {"max_tokens": arguments.max_tokens}

    def answer(text: str) -> None:
        show(_pieces(server.stream("/completions", {"prompt": text, **limit})))

    if arguments.quick is not None:
        answer(arguments.quick)
        return 0
    return converse(answer)


def _pieces(events: Iterator[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        for choice in event.get("choices", ()):
            yield choice.get("text") or ""
