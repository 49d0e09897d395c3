"""`chat` and `complete` with a server that sends the received text back."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from pegboard_command_talk import remote_server
from pegboard_command_talk.command import ChatCommand, CompleteCommand

from pegboard.errors import PegboardError
from pegboard.interfaces.command import Command, CommandSetup
from pegboard_testing.contract_command import CommandContract, command_setup
from pegboard_testing.contract_generic import check_entry, installed_entry


@pytest.mark.parametrize("word", ["chat", "complete"])
def test_contract(word: str) -> None:
    check_entry(installed_entry("command", word))


class TestChat(CommandContract):
    word = "chat"

    def command(self, setup: CommandSetup) -> Command:
        return ChatCommand(None, setup)


class TestComplete(CommandContract):
    word = "complete"

    def command(self, setup: CommandSetup) -> Command:
        return CompleteCommand(None, setup)


def chat(words):
    return ChatCommand(None, command_setup("chat")).run(words)


def complete(words):
    return CompleteCommand(None, command_setup("complete")).run(words)


class Answers(BaseHTTPRequestHandler):
    """Streams the last text of the request back, in two pieces."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.server.loading > 0:
            self.server.loading -= 1
            self._send(b'{"error": {"message": "the model is still loading; try again soon"}}', 503)
            return
        self._send(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, self.headers.get("Authorization"), body))
        if body["model"] == "missing":
            self._send(b'{"error": {"message": "no such model"}}', 404)
            return
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        lines = []
        for piece in (text[:2], text[2:]):
            choice = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
            lines.append(f"data: {json.dumps({'choices': [choice]})}\n\n")
        self._send(("".join(lines) + "data: [DONE]\n\n").encode())

    def _send(self, payload, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


@pytest.fixture
def server():
    httpd = HTTPServer(("127.0.0.1", 0), Answers)
    httpd.bodies = []
    httpd.loading = 0
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield httpd
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_chat_and_complete(server, capsys):
    url = f"http://127.0.0.1:{server.server_port}/v1"
    assert (
        chat(
            [
                "--url",
                url,
                "-q",
                "hello",
                "--system_prompt",
                "be nice",
                "--api-key",
                "key",
                "--max-tokens",
                "5",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == "hello\n"
    path, key, body = server.bodies.pop()
    assert (path, key, body["model"], body["max_completion_tokens"]) == (
        "/v1/chat/completions",
        "Bearer key",
        "first",
        5,
    )
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert complete(["--url", url, "--quick", "abcd", "--model-name", "second"]) == 0
    assert capsys.readouterr().out == "abcd\n"
    assert server.bodies.pop()[2] == {"prompt": "abcd", "model": "second", "stream": True}
    with pytest.raises(PegboardError, match="answered 404: no such model"):
        complete(["--url", url, "-q", "x", "--model-name", "missing"])


def test_a_conversation_remembers(server, capsys, monkeypatch):
    lines = ["one", " ", "two"]

    def read(prompt=""):
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    assert chat(["--url", f"http://127.0.0.1:{server.server_port}/v1"]) == 0
    assert [message["content"] for message in server.bodies[-1][2]["messages"]] == [
        "one",
        "one",
        "two",
    ]
    assert capsys.readouterr().out.split() == ["one", "two"]


def test_chat_waits_for_a_loading_model(server, capsys, monkeypatch):
    monkeypatch.setattr(remote_server, "INTERVAL_S", 0.0)
    server.loading = 3
    url = f"http://127.0.0.1:{server.server_port}/v1"
    assert chat(["--url", url, "-q", "hello"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "hello\n" and shown.err == f"{url}: the model is loading, waiting for it\n"
    server.loading = 1
    with pytest.raises(PegboardError, match="still loading after 0 s"):
        remote_server.RemoteServer(url, None, None, patience_s=0.0)
