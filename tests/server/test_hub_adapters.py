"""The resolver `hub` of a real server, with huggingface_hub and a small hub that speaks its
protocol."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import httpx
import openai
import pytest
from server_process import HTTP, MODEL, PATIENCE_S, Server, wait_until
from test_lora import BASE, OTHER, distance, make_adapter

TOKEN = "hf_secret"
PROMPT = "The three primary colors are"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
ALLOWED = "org/poet@v2, org/many, org/private, org/gone, org/slow, org/pickled, org/broken"


class Hub:
    """Repositories by name and revision: folders. asked: how often each path was asked for. open:
    slow files are sent once it is set. Private repositories are only there for requests with the
    token."""

    def __init__(self, root: Path) -> None:
        self.folders: dict[tuple[str, str], Path] = {}
        for seed, (name, revision) in enumerate(
            [
                (("org/poet"), ("main")),
                (("org/poet"), ("v2")),
                (("org/many"), ("main")),
                (("org/private"), ("main")),
                (("org/slow"), ("main")),
                ("org/pickled", "main"),
                ("org/broken", "main"),
                ("org/other", "main"),
            ],
            50,
        ):
            folder = self.folders[name, revision] = root / name / revision
            make_adapter(folder / "fr" if name == "org/many" else folder, seed)
        pickled = self.folders["org/pickled", "main"]
        (pickled / ADAPTER[1]).rename(pickled / "adapter_model.bin")
        (self.folders["org/broken", "main"] / ADAPTER[1]).write_bytes(b"x" * 100)
        self.asked: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        self.open = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._requests())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def num_asked(self, word: str) -> int:
        """Return how many requests had a path that contains the word."""
        return sum(count for path, count in self.asked.items() if word in path)

    def folder(self, name: str, revision: str, token: str | None) -> Path | None:
        """Return the folder of a revision, which may also be its commit."""
        self.tokens.add(token)
        if name == "org/private" and token != f"Bearer {TOKEN}":
            return None
        for (known, branch), folder in self.folders.items():
            if known == name and revision in (branch, commit_of(folder)):
                return folder
        return None

    def _requests(hub: Hub) -> type[BaseHTTPRequestHandler]:
        class Request(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = unquote(urlparse(self.path).path)
                if self.command == "GET":
                    hub.asked[path] += 1
                api = re.fullmatch(r"/api/models/(\w+/\w+)/(?:revision|tree)/(.+)", path)
                file = re.fullmatch(r"/(\w+/\w+)/resolve/([^/]+)/(.+)", path)
                match = api or file
                folder = (
                    hub.folder(match[1], match[2], self.headers["Authorization"]) if match else None
                )
                if folder is None:
                    return self.send(
                        401, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}
                    )
                if api:
                    told = (
                        files_of(folder)
                        if "/tree/" in path
                        else {"id": match[1], "sha": commit_of(folder)}
                    )
                    return self.send(200, json.dumps(told).encode())
                assert file is not None
                content = (folder / file[3]).read_bytes()
                headers = {
                    "X-Repo-Commit": commit_of(folder),
                    "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                }
                if match[1] == "org/slow" and self.command == "GET":
                    assert hub.open.wait(PATIENCE_S)
                self.send(200, content, headers)

            def send(
                self, status: int, content: bytes, headers: dict[str, str] | None = None
            ) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

        return Request


def files_of(folder: Path) -> list[dict[str, Any]]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [
        {
            "type": "file",
            "path": file.relative_to(folder).as_posix(),
            "size": file.stat().st_size,
            "oid": commit_of(file),
        }
        for file in files
    ]


def commit_of(folder: Path) -> str:
    return hashlib.sha1(str(folder).encode()).hexdigest()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    made = Hub(tmp_path_factory.mktemp("hub"))
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.open.set()
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(scope="module")
def server(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory, probe: Path, hub: Hub
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    flags = [
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--max-cpu-loras",
        "8",
        "--lora_resolver.hub.repositories",
        ALLOWED,
        "--lora-base-models",
        BASE,
        "--lora-resolver-wait-s",
        "1",
        "--hf-token",
        TOKEN,
    ]
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    with Server(smollm2_gguf, folder, *flags, probe=probe, **env) as running:
        yield running.wait_until_ready()


def ask_once(server: Server, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 20}
    return HTTP.post(f"{server.url}/v1/completions", json=body)


def ask(server: Server, model: str) -> httpx.Response:
    """Ask again while the adapter is still being fetched, as the server's answer advises."""
    answers: list[httpx.Response] = []
    wait_until(
        lambda: answers.append(ask_once(server, model)) or answers[-1].status_code != 503,
        f"{model} is fetched",
    )
    return answers[-1]


def scores_of(server: Server, model: str) -> dict[str, float]:
    """Return the logprobs of the first token's 20 best candidates."""
    answer = ask(server, model)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0])


def differs_from_base(server: Server, model: str) -> bool:
    return distance(scores_of(server, model), scores_of(server, MODEL)) > OTHER


def test_requests_at_once_fetch_one_revision_once(server: Server, hub: Hub) -> None:
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(lambda _: differs_from_base(server, "org/poet"), range(6)))
    commit = commit_of(hub.folders["org/poet", "v2"])
    for name in ADAPTER:
        assert hub.asked[f"/org/poet/resolve/{commit}/{name}"] == 1
    assert hub.num_asked("/org/poet/revision/v2") == 1 and not hub.num_asked(
        "/org/poet/revision/main"
    )


def test_a_folder_of_a_repository(server: Server, hub: Hub) -> None:
    assert differs_from_base(server, "org/many/fr")
    answer = ask(server, "org/many/de")
    assert (
        answer.status_code == 400
        and "no file 'de/adapter_model.safetensors'" in answer.json()["error"]["message"]
    )


def test_the_token_opens_a_private_repository(server: Server, hub: Hub) -> None:
    assert differs_from_base(server, "org/private")
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in server.log.read_text()


@pytest.mark.parametrize("name", ["org/other", "org/poet2", "other/poet", "org", "poet"])
def test_what_is_not_allowed_is_never_asked_for(client: openai.OpenAI, hub: Hub, name: str) -> None:
    asked = hub.asked.total()
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model=name, prompt=PROMPT, max_tokens=1)
    assert hub.asked.total() == asked


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/gone", "no repository org/gone"),
        ("org/pickled", "no file 'adapter_model.safetensors'"),
        ("org/broken", "not a safetensors file"),
    ],
)
def test_what_cannot_be_had_is_a_400_with_the_reason(
    server: Server, hub: Hub, name: str, words: str
) -> None:
    answer = ask(server, name)
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]["message"]
    assert f"`{name}` was found but could not be loaded" in told and words in told
    assert not hub.num_asked("adapter_model.bin"), "a pickle was fetched"
    asked = hub.asked.total()
    assert ask(server, name).status_code == 400 and hub.asked.total() == asked, (
        "the reason was remembered"
    )


def test_a_request_waits_only_so_long(server: Server, hub: Hub) -> None:
    """The others go on meanwhile, and so does the download."""
    first = ask_once(server, "org/slow")
    assert first.status_code == 503 and "still being fetched" in first.json()["error"]["message"]
    assert first.headers["Retry-After"] == "1"
    assert ask_once(server, MODEL).status_code == 200
    assert ask_once(server, "org/slow").status_code == 503
    hub.open.set()
    assert differs_from_base(server, "org/slow")
    commit = commit_of(hub.folders["org/slow", "main"])
    assert [hub.asked[f"/org/slow/resolve/{commit}/{name}"] for name in ADAPTER] == [1, 1]
