"""`pegboard chat` has a conversation with a running server. `pegboard complete` lets it continue
text. Both stream the answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pegboard import env
from pegboard.errors import PegboardError
from pegboard.interfaces.command import CommandSetup, FlagParser
from pegboard_command_talk.remote_server import RemoteServer


class ChatCommand:
    """The command `chat`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._setup = setup

    def run(self, words: Sequence[str]) -> int:
        return chat(words, self._setup)


class CompleteCommand:
    """The command `complete`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._setup = setup

    def run(self, words: Sequence[str]) -> int:
        return complete(words, self._setup)


def chat(words: Sequence[str], setup: CommandSetup) -> int:
    """Send one message with --quick, otherwise have a conversation until the input ends."""
    parser = _make_parser(setup, "Chat with a running server.")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system prompt of the conversation")
    arguments = parser.parse(words)
    server = RemoteServer(arguments.url, arguments.api_key, arguments.model_name)
    messages: list[dict[str, Any]] = []
    if arguments.system_prompt:
        messages.append({"role": "system", "content": arguments.system_prompt})
    limit = {} if arguments.max_tokens is None else {"max_completion_tokens": arguments.max_tokens}

    def answer(text: str) -> None:
        messages.append({"role": "user", "content": text})
        reply = Reply(arguments.stats)
        try:
            reply.show(
                server.stream("/chat/completions", {"messages": messages, **limit, **reply.options})
            )
        except BaseException:
            messages.pop()  # the conversation continues as if this message had not been sent
            raise
        messages.append({"role": "assistant", "content": reply.text})

    return _run(arguments.quick, answer)


def complete(words: Sequence[str], setup: CommandSetup) -> int:
    """Complete one text with --quick, otherwise complete each line of the input separately."""
    arguments = _make_parser(setup, "Complete text with a running server.").parse(words)
    server = RemoteServer(arguments.url, arguments.api_key, arguments.model_name)
    limit = {} if arguments.max_tokens is None else {"max_tokens": arguments.max_tokens}

    def answer(text: str) -> None:
        reply = Reply(arguments.stats)
        reply.show(server.stream("/completions", {"prompt": text, **limit, **reply.options}))

    return _run(arguments.quick, answer)


def _make_parser(setup: CommandSetup, description: str) -> FlagParser:
    """Add the flags that both commands have."""
    parser = setup.parser(prog=f"pegboard {setup.word}", description=description)
    parser.add_argument(
        "--url",
        default="http://localhost:8000/v1",
        help="base URL of the server (default %(default)s)",
    )
    parser.add_argument("--model-name", help="model to use (default: the first one served)")
    parser.add_argument(
        "--api-key",
        default=env.client_key(),
        help="API key to send (default: PEGBOARD_API_KEY, OPENAI_API_KEY)",
    )
    parser.add_argument(
        "-q", "--quick", metavar="TEXT", help="send this one text, print the answer and exit"
    )
    parser.add_argument("--max-tokens", type=int, help="most tokens to generate")
    parser.add_argument(
        "--stats", action="store_true", help="after each answer, print how fast it was"
    )
    return parser


class Reply:
    """One streamed answer. It is shown as it arrives, and kept. options: fields that the request
    must have. Ctrl-C ends the answer, not the program."""

    def __init__(self, with_stats: bool) -> None:
        self.text = ""
        self.options = {"stream_options": {"include_usage": True}} if with_stats else {}
        self._with_stats = with_stats
        self._num_tokens: int | None = None
        self._started_s = time.perf_counter()
        self._first_s: float | None = None

    def show(self, events: Iterator[dict[str, Any]]) -> None:
        """Print the text of `events`, then the statistics."""
        kept = []
        try:
            for is_answer, piece in self._pieces(events):
                if is_answer:
                    kept.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" …", end="")
        print()
        self.text = "".join(kept)
        if self._with_stats:
            self._tell()

    def _pieces(self, events: Iterator[dict[str, Any]]) -> Iterator[tuple[bool, str]]:
        """Yields (part of the answer, text to show). Reasoning is shown, but it is not part of the
        answer."""
        for event in events:
            if event.get("usage"):
                self._num_tokens = event["usage"].get("completion_tokens")
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                for is_answer, piece in (
                    (False, delta.get("reasoning") or delta.get("reasoning_content")),
                    (True, delta.get("content") or choice.get("text")),
                ):
                    if piece:
                        self._first_s = self._first_s or time.perf_counter()
                        yield is_answer, piece

    def _tell(self) -> None:
        now = time.perf_counter()
        if self._first_s is None or self._num_tokens is None:
            return
        rate = (
            (self._num_tokens - 1) / (now - self._first_s)
            if self._num_tokens > 1 and now > self._first_s
            else 0.0
        )
        first_ms = 1e3 * (self._first_s - self._started_s)
        print(
            f"[{self._num_tokens} tokens, first after {first_ms:.0f} ms, then {rate:.1f} per "
            f"second, {now - self._started_s:.2f} s in total]",
            file=sys.stderr,
        )


def _run(quick: str | None, answer: Callable[[str], None]) -> int:
    """Answer one text, or read lines and answer each of them, until the input ends (Ctrl-D) or
    Ctrl-C is pressed at the prompt."""
    if quick is not None:
        answer(quick)
        return 0
    if sys.stdin.isatty():
        print("Ctrl-D exits, Ctrl-C stops an answer.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not line.strip():
            continue
        try:
            answer(line)
        except PegboardError as error:
            print(f"error: {error}", file=sys.stderr)
