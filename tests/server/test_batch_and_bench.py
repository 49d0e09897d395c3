"""`pegboard run-batch`, `bench` and several API processes on the real model."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_process import MODEL, SIZES, Server, cli, processes, wait_until

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Say hi."}],
    "max_tokens": 4,
    "temperature": 0,
}
TEXT = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


def line(custom_id: Any, url: str, body: Any, **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more})


LINES: list[tuple[str, int]] = [
    (line("chat", "/v1/chat/completions", CHAT), 200),
    ("no JSON", 400),
    (line("text", "/v1/completions", TEXT), 200),
    (line("text", "/v1/completions", TEXT), 400),  # the id again
    ("", 0),
    (line("route", "/v1/nothing", {}), 404),
    (line("model", "/v1/completions", {**TEXT, "model": "other"}), 404),
    (line("field", "/v1/completions", {**TEXT, "temperatur": 1}), 400),
    (line("stream", "/v1/completions", {**TEXT, "stream": True}), 400),
    (line(3, "/v1/completions", TEXT), 400),
    (line("method", "/v1/completions", TEXT, method="GET"), 400),
    (line("body", "/v1/completions", "text"), 400),
    (line("more", "/v1/completions", TEXT, priority=1), 400),
    ("[1, 2]", 400),
    (line("last", "/v1/completions", TEXT), 200),
]


def check_answers(text: str) -> None:
    """One answer per line, in order, each with its own status."""
    wanted = [(asked, status) for asked, status in LINES if status]
    answers = [json.loads(part) for part in text.splitlines()]
    assert len(answers) == len(wanted)
    for (asked, status), answer in zip(wanted, answers, strict=True):
        assert set(answer) == {"id", "custom_id", "response", "error"}, answer
        assert answer["response"]["status_code"] == status, (asked, answer)
        if status == 200:
            assert answer["error"] is None and answer["response"]["body"]["choices"]
            assert answer["custom_id"] == json.loads(asked)["custom_id"]
        else:
            assert answer["response"]["body"] is None and answer["error"]["error"]["message"]
    assert "Paris" in answers[-1]["response"]["body"]["choices"][0]["text"]


def test_a_batch_file(smollm2_gguf: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out" / "answers.jsonl"
    source.write_text("\n".join(asked for asked, _ in LINES))
    ended = cli(
        "run-batch",
        str(smollm2_gguf),
        "-i",
        str(source),
        "-o",
        str(target),
        "--served-model-name",
        MODEL,
        *SIZES,
        TMPDIR=str(tmp_path),
    )
    assert ended.returncode == 0, ended.stderr
    check_answers(target.read_text())
    # the summary, and the bar
    assert "14 requests, 11 of them failed" in ended.stderr and "14/14" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [path.name for path in target.parent.iterdir()] == ["answers.jsonl"]


class Store(BaseHTTPRequestHandler):
    """Serves the batch file and receives the answers."""

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("\n".join(asked for asked, _ in LINES).encode())

    def do_PUT(self) -> None:
        self.server.stored = self.rfile.read(int(self.headers[("Content-Length")])).decode()  # type: ignore[attr-defined]
        self._answer(b"")

    def _answer(self, payload: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


@pytest.fixture
def store() -> Iterator[HTTPServer]:
    httpd = HTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield httpd
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_batch_by_url_needs_the_users_word(
    store: HTTPServer, smollm2_gguf: Path, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{store.server_port}"
    words = [
        "run-batch",
        str(smollm2_gguf),
        "-i",
        f"{url}/in",
        "-o",
        f"{url}/out",
        "--served-model-name",
        MODEL,
        *SIZES,
    ]
    ended = cli(*words, TMPDIR=str(tmp_path))
    assert ended.returncode == 2 and "--allow-urls" in ended.stderr
    ended = cli(*words, "--allow-urls", "--disable-tqdm", TMPDIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    check_answers(store.stored)  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-i", "nowhere.jsonl", "-o", "out"], "nowhere.jsonl"),
        (["-i", "ftp://x/y", "-o", "out"], "expected a path"),
        (["-o", "out"], "--input-file"),
    ],
)
def test_batches_that_cannot_be(words: list[str], told: str, tmp_path: Path) -> None:
    ended = cli("run-batch", *words, TMPDIR=str(tmp_path))
    assert ended.returncode in (1, 2) and told in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve(server: Server, tmp_path: Path, backend: str) -> None:
    custom = tmp_path / "prompts.jsonl"
    custom.write_text(
        "\n".join(json.dumps({"prompt": f"Count to {n}:", "output_tokens": 5}) for n in range(4))
    )
    ended = cli(
        "bench",
        "serve",
        "--port",
        str(server.port),
        "--backend",
        backend,
        "--num-prompts",
        "6",
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(custom),
        "--ignore-eos",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "result.json",
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
        "--metric-percentiles",
        "50,99.9",
        "--goodput",
        "e2el:600000",
        "--max-concurrency",
        "2",
        "--request-rate",
        "50",
        "--metadata",
        "who=test",
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert (
        result["output_lens"] == [5] * 6 and result["who"] == "test" and result["model_id"] == MODEL
    )
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert (
        result["backend"] == result["endpoint_type"] == backend and result["max_concurrency"] == 2
    )
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert (
            0
            < result[f"median_{metric}_ms"]
            == result[f"p50_{metric}_ms"]
            <= result[f"p99.9_{metric}_ms"]
        )
    assert 1 <= result["max_concurrent_requests"] <= 6  # per second, as vLLM counts
    assert "Mean TTFT (ms):" in ended.stdout and "6/6" in ended.stderr


def test_bench_of_nothing(tmp_path: Path) -> None:
    ended = cli("bench", "serve", "--port", "9", "--num-prompts", "1")
    assert ended.returncode == 1 and "is the server running?" in ended.stderr
    assert cli("bench", "servee").returncode == 2
    assert cli("bench", "serve", "--goodput", "x:1").returncode == 2


def test_bench_offline(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Latency and throughput in short runs give the fields that dashboards and scripts read."""
    sizes = [
        str(smollm2_gguf),
        *SIZES,
        "--disable-tqdm",
        "--output-json",
        str(tmp_path / "result.json"),
    ]
    words = [
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "1",
        "--batch-size",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "3",
    ]
    ended = cli("bench", "latency", *sizes, *words)
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (
        set(result) == {"avg_latency", "latencies", "percentiles"} and len(result["latencies"]) == 2
    )
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    sharegpt = [
        {
            "conversations": [
                {"from": "human", "value": "How are you today, friend?"},
                {"from": "gpt", "value": "Fine. " * 9},
            ]
        }
    ]
    (tmp_path / "sharegpt.json").write_text(json.dumps([*sharegpt, {"conversations": []}]))
    words = [
        "--dataset-name",
        "sharegpt",
        "--dataset-path",
        str(tmp_path / "sharegpt.json"),
        "--num-prompts",
        "3",
    ]
    ended = cli("bench", "throughput", *sizes, *words, "--output-len", "4")
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == {
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
    }
    assert result["num_requests"] == 3 and "Total num output tokens:  12" in ended.stdout


# --- several API processes ------------------------------------------------------------------------

StartServer = Callable[..., Server]


def api_processes(server: Server) -> list[int]:
    """Returns the children of the server that are API processes."""
    children = [pid for pid, parent, _ in processes() if parent == server.process.pid]
    return sorted(
        pid
        for pid in children
        if b"pegboard_server.api_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def test_two_api_processes_answer_alike_and_end_together(start_server: StartServer) -> None:
    server = start_server("--api-server-count", "2", "--enable-request-id-headers")
    spawned = api_processes(server)
    assert len(spawned) == 2
    with server.client() as client, ThreadPoolExecutor(16) as pool:
        texts = list(
            pool.map(lambda _: client.completions.create(**TEXT).choices[0].text, range(16))
        )
    assert len(set(texts)) == 1 and "Paris" in texts[0]
    wait_until(lambda: server.stats()["num_requests_running"] == 0, "no request runs")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    server.check_nothing_left()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    "victim", ["engine or api", pytest.param("parent", marks=pytest.mark.slow)]
)
def test_one_of_them_killed(start_server: StartServer, victim: str) -> None:
    """When any process dies, all other processes end too."""
    server = start_server("--api-server-count", "2")
    if victim == "parent":
        server.process.kill()
    else:
        os.kill(api_processes(server)[-1], signal.SIGKILL)
    assert server.wait() == (-signal.SIGKILL if victim == "parent" else 1)
    server.check_nothing_left()
