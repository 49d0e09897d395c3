"""Both sources pass the contract of their kind, with a fake server on this machine, if their
libraries are installed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from pegboard_model_source_object_storage import probe
from pegboard_model_source_object_storage.bucket_source import GoogleSource, S3Source
from pegboard_model_source_object_storage.stores import StoredObject

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    ModelReference,
    ModelSource,
    ModelSourceSetup,
)
from pegboard.interfaces.spec import Absent
from pegboard.plugins.importing import probe_facts
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_model_source import ModelSourceContract

OBJECTS = {
    "models/tiny/config.json": b"{}",
    "models/tiny/model.safetensors": b"weights",
    "models/tiny/pytorch_model.bin": b"pickled",
    "models/tiny/notes/readme.json": b"{}",
    "models/tiny2/config.json": b"[]",
}


@pytest.mark.parametrize("name", ["s3", "gs"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("model_source", name))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(probe, "version", version)
    for function, extra in ((probe.probe_s3, "s3"), (probe.probe_gs, "gs")):
        answer = function(probe_facts())
        assert isinstance(answer, Absent)
        assert f"pegboard-model-source-object-storage[{extra}]" in answer.reason


# --- with the libraries, and a server -------------------------------------------------------------


def content_key(path: str) -> str:
    """Return the key of the object whose content a path asks for."""
    return path.removeprefix("/download/storage/v1/b/b/o/").removeprefix("/b/")


class FakeStorage(BaseHTTPRequestHandler):
    """The few requests of the APIs of S3 and of Google Cloud Storage that the sources make."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        prefix = query.get("prefix", [""])[0]
        path = unquote(url.path)
        listed = {key: value for key, value in OBJECTS.items() if key.startswith(prefix)}
        if path.rstrip("/") == "/b" and "list-type" in query:
            contents = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(value)}</Size>"
                f"<ETag>v1</ETag></Contents>"
                for key, value in listed.items()
            )
            self.answer(f"<ListBucketResult>{contents}</ListBucketResult>".encode(), "text/xml")
        elif path == "/storage/v1/b/b/o":
            items = [
                {"name": key, "size": str(len(value)), "generation": "1", "bucket": "b"}
                for key, value in listed.items()
            ]
            self.answer(json.dumps({"items": items}).encode(), "application/json")
        elif (key := path.removeprefix("/download/storage/v1/b/b/o/")) in OBJECTS or (
            key := path.removeprefix("/b/")
        ) in OBJECTS:
            self.answer(OBJECTS[key], "application/octet-stream")
        elif (key := path.removeprefix("/storage/v1/b/b/o/")) in OBJECTS:
            size = str(len(OBJECTS[key]))
            self.answer(json.dumps({"name": key, "size": size}).encode(), "application/json")
        else:
            self.send_error(404)

    def answer(self, content: bytes, kind: str) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start >= len(content) > 0:
            self.send_error(416)
            return
        content = content[start:]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


class StorageContract(ModelSourceContract):
    scheme: str

    @pytest.fixture(autouse=True)
    def server(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        pytest.importorskip({"s3": "boto3", "gs": "google.cloud.storage"}[self.scheme])
        server = ThreadingHTTPServer(("127.0.0.1", 0), FakeStorage)
        url = f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "STORAGE_EMULATOR_HOST": url,
        }.items():
            monkeypatch.setenv(name, value)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield
        server.shutdown()
        thread.join()
        server.server_close()

    def present(self) -> ModelReference:
        return ModelReference(self.scheme, "//b/models/tiny")

    def missing(self) -> ModelReference:
        return ModelReference(self.scheme, "//b/models/none")

    def test_only_the_files_of_the_folder_are_fetched(self, cache: Path) -> None:
        root = self.fetch(cache, self.present()).root
        names = {path.name for path in root.iterdir() if not path.name.startswith(".")}
        assert names == {"config.json", "model.safetensors"}


class TestS3(StorageContract):
    scheme = "s3"

    def source(self, setup: ModelSourceSetup) -> ModelSource:
        return S3Source(None, setup)


class TestGoogle(StorageContract):
    scheme = "gs"

    def source(self, setup: ModelSourceSetup) -> ModelSource:
        return GoogleSource(None, setup)


# --- without them ---------------------------------------------------------------------------------


class FakeStore:
    """names: of the objects. Each has three bytes."""

    names: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    version = "1"
    content = b"abc"

    def objects(self, bucket: str, prefix: str) -> Iterator[StoredObject]:
        for name in FakeStore.names:
            yield StoredObject(prefix + name, 3, FakeStore.version)

    def chunks(self, bucket: str, key: str) -> Iterator[bytes]:
        FakeStore.reads += (key,)
        yield FakeStore.content


class FakeSource(S3Source):
    store = FakeStore


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    for name, value in {"names": (), "reads": (), "version": "1", "content": b"abc"}.items():
        monkeypatch.setattr(FakeStore, name, value)
    return FakeSource(None, ModelSourceSetup(tmp_path))


def fetched(source: FakeSource, name: str = "//b/m", file: str | None = None) -> Path:
    reference = ModelReference("s3", name, None, file)
    return source.fetch(reference, FileFilter(), lambda *step: None).root


@pytest.mark.parametrize("name", ["../config.json", "a/../../x.json", "a\\b.json", "/etc/x.json"])
def test_names_that_point_outside_are_refused(source: FakeSource, name: str) -> None:
    FakeStore.names = ("config.json", name)
    with pytest.raises(ModelError, match=r"s3://b/m is refused"):
        fetched(source)
    assert not FakeStore.reads


@pytest.mark.parametrize("name", ["b/m", "//", "//../m", "//b/../m", "//b/a\\m"])
def test_references_that_name_no_folder_are_refused(source: FakeSource, name: str) -> None:
    with pytest.raises(ModelError, match="expected s3://bucket/folder"):
        fetched(source, name)


def test_only_what_has_changed_is_fetched_again(source: FakeSource) -> None:
    FakeStore.names = ("config.json", "model.safetensors")
    fetched(source)
    fetched(source)
    assert FakeStore.reads == ("m/config.json", "m/model.safetensors")
    FakeStore.version = "2"
    fetched(source)
    assert len(FakeStore.reads) == 4


def test_a_short_file_is_an_error_and_leaves_nothing(source: FakeSource, tmp_path: Path) -> None:
    FakeStore.names = ("config.json",)
    FakeStore.content = b"ab"
    with pytest.raises(ModelError, match=r"config\.json has 2 bytes instead of 3"):
        fetched(source)
    assert not list(tmp_path.rglob("*.json")) and not list(tmp_path.rglob(".part-*"))


def test_pickled_weights_are_fetched_only_if_there_are_no_others(source: FakeSource) -> None:
    FakeStore.names = ("config.json", "pytorch_model.bin", "training_args.bin", "optimizer.pt")
    folder = fetched(source)
    assert (folder / "pytorch_model.bin").is_file()
    assert not any((folder / name).exists() for name in ("training_args.bin", "optimizer.pt"))


def test_one_file_is_named(source: FakeSource) -> None:
    FakeStore.names = ("config.json", "one.gguf", "two.gguf")
    assert fetched(source, file="two.gguf").name == "two.gguf"
    with pytest.raises(ModelError, match="contains no file 'three.gguf'"):
        fetched(source, file="three.gguf")
