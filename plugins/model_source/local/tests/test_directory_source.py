"""The paths that the source `local` accepts, and its errors for all others."""

from __future__ import annotations

from pathlib import Path

import pytest
from pegboard_model_source_local.directory import DirectorySource

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSourceSetup,
)


def _fetch(
    path: Path | str,
    file: str | None = None,
    patterns: tuple[str, ...] = (),
    revision: str | None = None,
) -> LocalFiles:
    source = DirectorySource(None, ModelSourceSetup(Path("unused")))
    reference = ModelReference("local", str(path), revision=revision, file=file)
    return source.fetch(reference, FileFilter(patterns), lambda *_: None)


def _make(directory: Path, *names: str) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return directory


@pytest.mark.parametrize(
    ("names", "root"),
    [
        (["config.json", "model.safetensors"], "."),
        (["config.json"], "."),
        (["config.json", "model.safetensors", "extra.gguf"], "."),
        (["model.gguf", "README.md"], "model.gguf"),
        (["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"], "big-00001-of-00002.gguf"),
    ],
)
def test_directory_layouts(tmp_path, names, root):
    assert _fetch(_make(tmp_path, *names)).root == tmp_path / root


def test_a_file_is_itself_and_relative_paths_become_absolute(tmp_path, monkeypatch):
    _make(tmp_path, "model.gguf")
    monkeypatch.chdir(tmp_path)
    assert _fetch("model.gguf").root == tmp_path / "model.gguf"
    assert _fetch("./model.gguf", file="model.gguf").root == tmp_path / "model.gguf"


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    _make(tmp_path, "model.gguf")
    assert _fetch("~/model.gguf").root == tmp_path / "model.gguf"


def test_a_gguf_by_the_type_of_its_weights(tmp_path):
    _make(
        tmp_path,
        "a-Q4_K_M.gguf",
        "a.q8_0.gguf",
        "b-IQ1_S-00001-of-00002.gguf",
        "b-IQ1_S-00002-of-00002.gguf",
        "mmproj-Q8_0.gguf",
    )
    assert _fetch(tmp_path, file="Q4_K_M").root == tmp_path / "a-Q4_K_M.gguf"
    assert _fetch(tmp_path, file="Q8_0").root == tmp_path / "a.q8_0.gguf"
    assert _fetch(tmp_path, file="IQ1_S").root == tmp_path / "b-IQ1_S-00001-of-00002.gguf"
    with pytest.raises(ModelError, match="there is no file 'Q4_K'"):
        _fetch(tmp_path, file="Q4_K")


def test_a_vision_tower_is_no_model(tmp_path):
    _make(tmp_path, "mmproj-model.gguf", "model.gguf")
    assert _fetch(tmp_path).root == tmp_path / "model.gguf"


def test_one_of_several_ggufs_must_be_named(tmp_path):
    _make(tmp_path, "a.gguf", "b.gguf", "sub/c.gguf")
    with pytest.raises(ModelError, match=r"name one of them.*a\.gguf, b\.gguf"):
        _fetch(tmp_path)
    assert _fetch(tmp_path, file="b.gguf").root == tmp_path / "b.gguf"
    assert _fetch(tmp_path, file="sub/c.gguf").root == tmp_path / "sub" / "c.gguf"
    with pytest.raises(ModelError, match=r"no file 'z\.gguf'.*a\.gguf"):
        _fetch(tmp_path, file="z.gguf")


def test_missing_paths_are_named_with_close_ones(tmp_path):
    _make(tmp_path, "models/smollm2.gguf")
    with pytest.raises(ModelError, match=r"no model at .*smolm2\.gguf.*there is smollm2\.gguf"):
        _fetch(tmp_path / "models" / "smolm2.gguf")
    with pytest.raises(ModelError, match="there is models"):
        _fetch(tmp_path / "model" / "deeper" / "x.gguf")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["notes.txt"], r"looked for config\.json.*notes\.txt"),
        (["model.safetensors"], r"weights but no config\.json"),
    ],
)
def test_directories_without_a_model(tmp_path, names, message):
    with pytest.raises(ModelError, match=message):
        _fetch(_make(tmp_path, *names))


def test_a_directory_with_a_format_of_its_own(tmp_path):
    """A weight loader that somebody installed may read files that this source does not know."""
    source = DirectorySource(
        None, ModelSourceSetup(tmp_path, weight_patterns=("*.gguf", "*.pebble", "*.safetensors"))
    )
    _make(tmp_path / "model", "weights.pebble", "notes.txt")
    assert (
        source.fetch(ModelReference("local", str(tmp_path / "model")), FileFilter(), print).root
        == tmp_path / "model"
    )
    _make(tmp_path / "other", "notes.txt")
    with pytest.raises(ModelError, match=r"or a \*\.gguf file, or \*\.pebble; it contains: notes"):
        source.fetch(ModelReference("local", str(tmp_path / "other")), FileFilter(), print)


def test_nothing_is_ignored_silently(tmp_path):
    _make(tmp_path, "model.gguf")
    with pytest.raises(ModelError, match="no revisions"):
        _fetch(tmp_path, revision="main")
    with pytest.raises(ModelError, match="contains no file"):
        _fetch(tmp_path / "model.gguf", file="other.gguf")
    with pytest.raises(ModelError, match=r"no file matching \*\.safetensors"):
        _fetch(tmp_path, patterns=("*.safetensors",))
