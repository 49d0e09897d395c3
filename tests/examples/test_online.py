"""The scripts of examples/online against real servers: the default model, and tiny ones."""

from __future__ import annotations

import re
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from server_process import Server, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
ONLINE = EXAMPLES / "online"
RunExample = Callable[..., str]
SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "8M")
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"),
]

DEFAULT = {
    "api_client": [r"\n.*\|.*\|"],
    "first_model": [r"first model: smol\nsmol\n"],
    "chat_completion_client": [r"\|France\||France.*\|"],
    "chat_completion_client_with_tools": [
        r"call: get_weather \{'city': 'Dallas', 'unit': '\w+'\}",
        r"answer: .+",
    ],
    "chat_completion_client_with_tools_required": [
        r'call: get_weather \{"city": ?"Dallas", ?"unit": ?"\w+"\}',
        r"stream: get_weather\|.+\|",
    ],
    "chat_completion_client_with_tools_xlam": [r"calls: \[", r"stream: content '"],
    "completion_client": [
        r"0: '.+'\n1: '.+'",
        r"echo: 'A robot may not injure a human being.+'",
        r"  'A': None\n  '.+': -\d",
    ],
    "responses_client": [r"first: .+", r"second: .+", r"\|.+\|"],
    "responses_client_with_tools": [
        r'call: get_weather \{"city": ?"(Oslo|Dallas)"\}',
        r"answer: .+",
    ],
    "responses_client_with_mcp_tools": [
        r'calculator\.add \{"x": ?20, ?"y": ?22\} -> 42(\.0)?\nanswer: .*42'
    ],
    "structured_outputs": [
        r"choice: (positive|negative)\n",
        r"regex: [a-z]+@example\.com\n",
        r"grammar: SELECT (name|email) FROM users\n",
        r'json: \{\s*"kind": ?"(sedan|truck)"',
        r"parsed: Car\(kind=<Kind\.",
        r"structural tag: .+",
    ],
    "token_generation_client": [r"text: ' Paris.+, the same: True"],
    "prometheus_metrics": [r"vllm:generation_tokens_total: \+8\n"],
    "sagemaker_client": [r"ping: 200\nchat\.completion: .+\ntext_completion: .+"],
}
"""What each script prints with the default model."""


@pytest.fixture(autouse=True)
def clients_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A script leaves its client to the end of the process."""
    clients: list[openai.OpenAI] = []

    class Client(openai.OpenAI):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            clients.append(self)

    monkeypatch.setattr(openai, "OpenAI", Client)
    yield
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def tool_server() -> Iterator[str]:
    """Yields host:port of examples/tool_server.py."""
    server = runpy.run_path(str(EXAMPLES / "tool_server.py"))["server"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(server.sse_app(), log_level="critical", lifespan="off")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        running.should_exit = running.force_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """start(model, *flags, **env) starts a server that stops after the module."""
    running: list[Server] = []

    def server(model: Path, *flags: str, **env: str) -> Server:
        folder = tmp_path_factory.mktemp("server")
        running.append(Server(model, folder, *flags, **env))
        return running[-1]

    yield server
    for each in running:
        each.stop()
        each.check_nothing_left()


@pytest.fixture(scope="module")
def collector() -> int:
    """The port to which the default server sends its spans."""
    return free_port()


@pytest.fixture(scope="module")
def encoders(start: Callable[..., Server], tiny: dict[str, Path]) -> dict[str, Server]:
    """Servers that start while others do: SCORES, VECTORS."""
    return {name: start(tiny[name], "--max-model-len", "128") for name in ("SCORES", "VECTORS")}


@pytest.fixture(scope="module")
def default(
    smollm2_gguf: Path,
    start: Callable[..., Server],
    encoders: dict[str, Server],
    tool_server: str,
    collector: int,
) -> str:
    """The address of a server with the default model."""
    endpoint = f"http://127.0.0.1:{collector}/v1/traces"
    flags = ("--tool-server", tool_server, "--tool-call-parser", "xlam")
    flags += ("--otlp-traces-endpoint", endpoint)
    traces = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    return start(smollm2_gguf, *flags, **traces).wait_until_ready().url


@pytest.fixture(scope="module")
def scores(encoders: dict[str, Server]) -> str:
    return encoders["SCORES"].wait_until_ready().url


@pytest.fixture(scope="module")
def vectors(encoders: dict[str, Server]) -> str:
    return encoders["VECTORS"].wait_until_ready().url


def check(printed: str, patterns: list[str]) -> None:
    for pattern in patterns:
        assert re.search(pattern, printed), f"{pattern} is not in\n{printed}"


@pytest.mark.parametrize("name", DEFAULT)
def test_with_the_default_model(name: str, default: str, run_example: RunExample) -> None:
    check(run_example(f"online/{name}", "--url", default), DEFAULT[name])


def test_opentelemetry_client(default: str, collector: int, run_example: RunExample) -> None:
    words = ("--url", default, "--port", collector)
    printed = run_example("online/opentelemetry_client", *words)
    check(printed, [r"llm_request, child of the client's span: True", r"completion_tokens"])


def test_a_process_of_its_own(default: str) -> None:
    command = [sys.executable, str(ONLINE / "chat_completion_client.py"), "--url", default]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "France" in ended.stdout, ended.stderr


def test_the_clients_of_pages(default: str) -> None:
    """Gradio and Streamlit are not installed, so only what asks the server runs."""
    chat = runpy.run_path(str(ONLINE / "gradio_openai_chatbot.py"))["answer"]
    texts = [*chat("Name a color.", [{"role": "user", "content": "Hello"}], default)]
    assert len(texts) > 3 and texts[-1].startswith(texts[1])
    complete = runpy.run_path(str(ONLINE / "gradio_webserver.py"))["complete"]
    assert [*complete("Two and two are", default)][-1].startswith("Two and two are ")
    pieces = runpy.run_path(str(ONLINE / "streamlit_openai_chatbot.py"))["pieces"]
    assert "".join(pieces([{"role": "user", "content": "Name a color."}], default))


def test_retrieval_augmented_generation(
    default: str, vectors: str, run_example: RunExample
) -> None:
    words = ("--url", default, "--embedding-url", vectors)
    printed = run_example("online/retrieval_augmented_generation", *words)
    check(printed, [r"document: The .+\.\nanswer: .+"])


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("cross_encoder_score", [r"^(\d: 0\.\d{4}\n){4}$"]),
        ("rerank_client", [r"(?s)/rerank\n(  0\.\d{4} .+\n){2}/v1/rerank\n.+/v2/rerank\n"]),
        ("classification_client", [r"(?s)('.+': .+ \[0\.\d+\]\n){2}"]),
    ],
)
def test_scores(name: str, patterns: list[str], scores: str, run_example: RunExample) -> None:
    check(run_example(f"online/{name}", "--url", scores), patterns)


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("embedding_client", [r"32 numbers", r"the same vector: True", r"32 numbers in 64 bytes"]),
        ("pooling_client", [r"token_embed '.+': \d+ x 32\n", r"\nembed '.+': 1 x 32\n"]),
        ("embedding_long_text", [r"23\d\d tokens in 2\d chunks: 32 numbers"]),
    ],
)
def test_vectors(name: str, patterns: list[str], vectors: str, run_example: RunExample) -> None:
    check(run_example(f"online/{name}", "--url", vectors), patterns)


@pytest.mark.slow
def test_recordings(
    start: Callable[..., Server], tiny: dict[str, Path], run_example: RunExample
) -> None:
    url = start(tiny["WHISPER"], *SMALL, "--max-model-len", "96").wait_until_ready().url
    printed = run_example("online/transcription_client", "--url", url)
    check(printed, [r"text: w.+", r"verbose: 1(\.0)? seconds, \d segments", r"stream: .*w\d.*\|"])
    check(run_example("online/translation_client", "--url", url), [r"^text: .*\n$"])


@pytest.mark.slow
def test_images_and_embeddings(
    start: Callable[..., Server], tiny: dict[str, Path], run_example: RunExample
) -> None:
    flags = ("--limit-mm-per-prompt", '{"image": 2}', "--max-model-len", "256")
    server = start(tiny["IMAGES"], *SMALL, *flags, "--enable-prompt-embeds").wait_until_ready()
    name = "online/chat_completion_client_for_multimodal"
    printed = run_example(name, "--url", server.url)
    check(printed, [r"\['red'\]: \d+ prompt tokens: '", r"\['red', 'blue'\]: \d+ prompt"])
    weights = ("--weights", tiny["IMAGES"] / "model.safetensors", "--prompt", "w5 w6 w7")
    printed = run_example("online/prompt_embeds_client", "--url", server.url, *weights)
    check(printed, [r"embeddings: '(w.+)'\ntokens: ' \1'\n"])


@pytest.mark.slow
def test_reasoning(
    smollm2_gguf: Path, start: Callable[..., Server], run_example: RunExample
) -> None:
    flags = ("--reasoning-parser", "deepseek_r1", "--chat-template", THINKING)
    url = start(smollm2_gguf, *flags).wait_until_ready().url
    printed = run_example("online/chat_completion_with_reasoning", "--url", url)
    check(printed, [r"reasoning: \s*\S+"])
    printed = run_example("online/chat_completion_with_reasoning_streaming", "--url", url)
    check(printed, [r"reasoning: [^|]*\|"])
    printed = run_example("online/chat_completion_tool_calls_with_reasoning", "--url", url)
    check(printed, [r'reasoning: None\ncall: get_weather \{"city": ?"\w+", ?"unit": ?"\w+"\}'])


def test_every_script_parses() -> None:
    for path in sorted(ONLINE.glob("*.py")):
        compile(path.read_text("utf-8"), str(path), "exec")
