"""The example's proxy before two servers, of which the first one encodes images."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_process import PATIENCE_S, Server, free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from test_media import asked, expected, part, url_of
from tiny_media import MediaReference, write_llava

from pegboard_testing.contract_multimodal_processor import random_image

pytestmark = pytest.mark.slow

PROXY = Path(__file__).parents[2] / "examples/encoder_proxy.py"
IMAGE = random_image(40, 20, seed=1)


class Proxy:
    def __init__(self, url: str) -> None:
        self.url = url


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def servers(
    llava: MediaReference, rows: Path, tmp_path_factory: pytest.TempPathFactory, probe: Path
) -> Iterator[list[Server]]:
    sizes = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
    option = "--encoder_connector.shared_storage"
    shared = ("--encoder-connector", "shared_storage", f"{option}.shared_storage_path", str(rows))
    roles = [(f"{option}.role", role) for role in ("ec_producer", "ec_consumer")]
    first, second = (tmp_path_factory.mktemp("server") for _ in roles)
    encodes = (*roles[0], "--mm-encoder-only")
    with (
        Server(llava.directory, first, *sizes, *shared, *encodes, probe=probe) as producer,
        Server(llava.directory, second, *sizes, *shared, *roles[1], probe=probe) as consumer,
    ):
        yield [producer.wait_until_ready(), consumer.wait_until_ready()]
    producer.check_nothing_left()
    consumer.check_nothing_left()


@pytest.fixture(scope="module")
def proxy(servers: list[Server]) -> Iterator[Proxy]:
    port = free_port()
    urls = [server.url for server in servers]
    process = subprocess.Popen([sys.executable, str(PROXY), *urls, str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                httpx.get(url)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield Proxy(url)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_an_image_is_encoded_by_the_first_server(
    llava: MediaReference, proxy: Proxy, rows: Path
) -> None:
    answer = asked(proxy, part(url_of(IMAGE)), "w7 w8")  # type: ignore[arg-type]
    text = answer.json()["choices"][0]["message"]["content"]
    assert text.strip() == expected(llava, IMAGE, 7, 8)
    assert len([*rows.rglob("*.safetensors")]) == 1
    stream = asked(proxy, part(url_of(IMAGE)), "w7 w8", stream=True)  # type: ignore[arg-type]
    assert stream.text.rstrip().endswith("[DONE]")
    assert len([*rows.rglob("*.safetensors")]) == 1


def test_text_and_errors_pass(llava: MediaReference, proxy: Proxy) -> None:
    answer = asked(proxy, "w7 w8")  # type: ignore[arg-type]
    text = answer.json()["choices"][0]["message"]["content"]
    assert text.strip() == expected(llava, 7, 8)
    wrong = asked(proxy, part("data:image/png;base64,AAAA"))  # type: ignore[arg-type]
    assert wrong.status_code == 400 and "content[0]" in wrong.text
