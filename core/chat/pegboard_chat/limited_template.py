"""Renders the chat templates of a server. A template is a program, and Jinja's sandbox keeps it
from other objects but not from endless loops and huge texts. So templates run in a process of their
own, with limits on time and memory.

The process is started for the first chat and then kept. It renders one chat at a time. When it
exceeds a limit, it is ended, and the next chat gets a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pegboard.errors import MalformedRequest, Overloaded, PegboardError, RequestError

LIMIT_S = 5.0
"""How many seconds one template may take, and how long a request waits for its turn."""

START_S = 60.0
"""How many seconds the process may take to start."""

LIMIT_BYTES = 512 * 1024 * 1024
"""How much memory the process may have."""

# a signal to the whole process group is for the server, which lets running requests finish
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, "
    "signal.SIG_IGN); import json, sys; sys.path[:] = json.loads(sys.argv[1]); from "
    "pegboard_chat.chat_template import answer_job; from pegboard_chat.limited_template import "
    "answer_all; answer_all(answer_job)"
)


class LimitedTemplates:
    """One process that renders templates. Used from any thread. parameter: the field that the error
    of a limit names."""

    def __init__(self, limit_s: float = LIMIT_S, parameter: str = "chat_template") -> None:
        self._limit_s = limit_s
        self._parameter = parameter
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, source: str, special_tokens: Mapping[str, str], chat: Mapping[str, Any]
    ) -> tuple[str, list[str]]:
        """Return the text of the prompt, and what of the chat the template does not read. chat: the
        fields of a `Chat`. Raises RequestError, also if the template exceeds a limit, and
        Overloaded if other templates take too long."""
        try:
            job = (
                json.dumps(
                    {"source": source, "special_tokens": dict(special_tokens), "chat": dict(chat)}
                ).encode()
                + b"\n"
            )
        except (TypeError, ValueError, RecursionError) as error:  # such as a number of 5000 digits
            raise RequestError(
                f"the chat cannot be rendered: {error!s:.200}", parameter="messages"
            ) from error
        if not self._lock.acquire(timeout=self._limit_s):
            raise Overloaded("other chats are being rendered; try again")
        try:
            answer = self._exchange(job)
        finally:
            self._lock.release()
        if "error" in answer:
            raise (MalformedRequest if answer["is_malformed"] else RequestError)(
                answer["error"], parameter=answer["parameter"]
            )
        return str(answer["text"]), list(answer["unused"])

    def close(self) -> None:
        """End the process."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.communicate()

    def _exchange(self, job: bytes) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._start()
        try:
            assert self._process.stdin is not None, "a pipe"
            self._process.stdin.write(job)
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._read(self._process, self._limit_s))
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self.close()
            limit = (
                f"took over {self._limit_s:g} s"
                if isinstance(error, TimeoutError)
                else "needed too much memory"
            )
            reason = f"the chat template {limit}; expected one that renders a chat quickly"
            raise RequestError(reason, parameter=self._parameter) from error
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            self._read(process, START_S)
        except (OSError, EOFError) as error:
            process.kill()
            process.communicate()
            raise PegboardError(
                f"the process for chat templates did not start within {START_S:g} s"
            ) from error
        return process

    def _read(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes:
        """Return the next line of the process. Raises EOFError, TimeoutError."""
        assert process.stdout is not None, "a pipe"
        descriptor = process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            parts.append(os.read(descriptor, 1 << 20))
            if not parts[-1]:
                raise EOFError
        return b"".join(parts)


def answer_all(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run in the process: answer each line of the standard input with one line."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    answers.write(b"ready\n")
    answers.flush()
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
            # if the parent is gone
            resource.setrlimit(
                resource.RLIMIT_CPU, (used_s + 2 * int(LIMIT_S), resource.RLIM_INFINITY)
            )
            answers.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
            answers.flush()
