"""What is fetched from a fake ModelScope, what is kept, and what its errors become."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_modelscope import TOKEN, FakeModelScope, serving
from modelscope_hub import config, constants
from pegboard_model_source_modelscope.modelscope import ModelScopeSource

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSourceSetup,
)

LOADERS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.safetensors")
MODEL = {
    "config.json": b"{}",
    "configuration.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "1_Pooling/config.json": b"{}",
}
WEIGHTS = {"model-00001-of-00001.safetensors": b"weights"}
OTHERS = {
    "README.md": b"x",
    ".msc": b"x",
    "modeling_x.py": b"x",
    "pytorch_model.bin": b"pickled",
    "optimizer.pt": b"state",
    "a-Q4_0.gguf": b"packed",
}
SPLIT = {f"big/m-q8_0-0000{number}-of-00002.gguf": b"packed" for number in (1, 2)}


@pytest.fixture(autouse=True)
def repository(site: FakeModelScope) -> None:
    site.repositories["org/name"] = {
        "master": {**MODEL, **WEIGHTS, **OTHERS, **SPLIT},
        "v1": {"config.json": b"[]", "model.safetensors": b"older"},
    }


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fetch(
    cache: Path,
    name: str = "org/name",
    file: str | None = None,
    revision: str | None = None,
    patterns: tuple[str, ...] = (),
    **more: Any,
) -> LocalFiles:
    setup = ModelSourceSetup(cache, **{"weight_patterns": LOADERS, **more})
    reference = ModelReference("modelscope", name, revision, file)
    return ModelScopeSource(None, setup).fetch(reference, FileFilter(patterns), lambda *step: None)


def names_in(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_only_what_the_loaders_want_is_fetched(site: FakeModelScope, cache: Path) -> None:
    files = fetch(cache)
    assert names_in(files.root) == set(MODEL) | set(WEIGHTS)
    assert set(files.digests) == names_in(files.root)
    assert {revision for revision, _ in site.reads} == {"master"}
    assert files.root.is_relative_to(cache.resolve() / "modelscope")


def test_a_pattern_that_the_caller_names(cache: Path) -> None:
    assert names_in(fetch(cache, patterns=("tokenizer*", "*.bin")).root) == {"tokenizer.json"}


@pytest.mark.parametrize(("name", "revision"), [("org/name@v1", None), ("org/name", "v1")])
def test_a_revision(cache: Path, name: str, revision: str | None) -> None:
    root = fetch(cache, name, revision=revision).root
    assert (root / "model.safetensors").read_bytes() == b"older"
    assert names_in(root) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("weights", "loaders", "fetched"),
    [
        (["pytorch_model.bin", "model.safetensors"], LOADERS, ["model.safetensors"]),
        (["pytorch_model.bin", "x.pt", "training_args.bin"], LOADERS, ["pytorch_model.bin"]),
        (["x.pth", "optimizer.pt", "scheduler.pt"], LOADERS, ["x.pth"]),
        (["pytorch_model.bin"], ("*.safetensors",), []),
        (["onnx/model.safetensors", "pytorch_model.bin"], LOADERS, ["pytorch_model.bin"]),
        (["2_Dense/model.safetensors"], LOADERS, ["2_Dense/model.safetensors"]),
    ],
)
def test_pickled_weights_are_fetched_only_if_there_are_no_others(
    site: FakeModelScope,
    cache: Path,
    weights: list[str],
    loaders: tuple[str, ...],
    fetched: list[str],
) -> None:
    files = {"config.json": b"{}", **dict.fromkeys(weights, b"w")}
    site.repositories["org/name"]["master"] = files
    root = fetch(cache, weight_patterns=loaders).root
    assert names_in(root) == {"config.json", *fetched}


@pytest.mark.parametrize(
    ("file", "fetched"),
    [
        ("a-Q4_0.gguf", ["a-Q4_0.gguf"]),
        ("Q4_0", ["a-Q4_0.gguf"]),
        ("Q8_0", sorted(SPLIT)),
        (sorted(SPLIT)[0], sorted(SPLIT)),
    ],
)
def test_a_gguf_file_comes_alone(cache: Path, file: str, fetched: list[str]) -> None:
    path = fetch(cache, file=file).root
    root = path.parents[fetched[0].count("/")]
    assert path == root / fetched[0]
    assert sorted(names_in(root)) == fetched
    assert fetch(cache, file=file, offline=True).root == path


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("b.gguf", r"contains no file 'b\.gguf'"),
        ("Q2_K", "contains no Q2_K GGUF file"),
        ("b.safetensors", "contains no file 'b.safetensors'"),
    ],
)
def test_a_file_that_is_not_there(
    site: FakeModelScope, cache: Path, file: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        fetch(cache, file=file)
    assert not site.reads


def test_several_files_of_a_type(site: FakeModelScope, cache: Path) -> None:
    site.repositories["org/name"]["master"]["c.q4_0.gguf"] = b"packed"
    with pytest.raises(ModelError, match=r"several models of the type Q4_0: a-Q4_0.gguf, c.q4_0"):
        fetch(cache, file="Q4_0")


def test_a_repository_without_a_model_says_what_to_name(site: FakeModelScope, cache: Path) -> None:
    site.repositories["org/name"]["master"] = {"a.gguf": b"packed"}
    with pytest.raises(ModelError, match=r"org/name:FILE\.gguf or org/name:Q4_K_M"):
        fetch(cache)
    assert not site.reads


def test_only_what_has_changed_is_read_again(site: FakeModelScope, cache: Path) -> None:
    root = fetch(cache).root
    site.reads.clear()
    fetch(cache)
    assert not site.reads
    (root / "config.json").write_bytes(b"??")
    site.repositories["org/name"]["master"]["tokenizer.json"] = b"[]"
    fetch(cache)
    assert sorted(site.reads) == [("master", "config.json"), ("master", "tokenizer.json")]
    assert (root / "config.json").read_bytes() == b"{}"


def test_another_revision_in_the_cache_is_no_substitute(site: FakeModelScope, cache: Path) -> None:
    """The library takes the only revision in the cache if none is named."""
    site.repositories["org/name"]["v1"] = {**MODEL, **WEIGHTS}
    fetch(cache, revision="v1")
    root = fetch(cache).root
    assert root.name == "master" and names_in(root) == set(MODEL) | set(WEIGHTS)


def test_what_the_repository_has_removed_goes(site: FakeModelScope, cache: Path) -> None:
    """Else a loader could take the old weights."""
    root = fetch(cache).root
    (root / "mine.safetensors").write_bytes(b"x")
    files = site.repositories["org/name"]["master"]
    files["model.safetensors"] = files.pop(*WEIGHTS)
    assert fetch(cache).root == root
    assert names_in(root) == set(MODEL) | {"model.safetensors", "mine.safetensors"}


def test_a_damaged_record_is_ignored(site: FakeModelScope, cache: Path) -> None:
    root = fetch(cache).root
    for text in ("{", "[]", '{"config.json": 1, "../x": ["a", 1, 2]}'):
        (root.parent / ".master.pegboard.json").write_text(text)
        assert fetch(cache).root == root
    assert len(site.reads) == len(MODEL) + len(WEIGHTS)


def test_a_changed_file_has_no_digest(cache: Path) -> None:
    root = fetch(cache).root
    (root / "config.json").write_bytes(b"[1]")
    files = fetch(cache, offline=True)
    assert set(files.digests) == names_in(root) - {"config.json"}


def test_the_second_site_is_asked(site: FakeModelScope, monkeypatch: pytest.MonkeyPatch) -> None:
    other = FakeModelScope()
    other.repositories["org/other"] = {"master": {"config.json": b"{}"}}
    first = os.environ["MODELSCOPE_ENDPOINT"]
    monkeypatch.delenv("MODELSCOPE_ENDPOINT")
    with serving(other) as second:
        monkeypatch.setattr(constants, "DEFAULT_ENDPOINT", first)
        monkeypatch.setattr(config, "DEFAULT_ENDPOINT", first)
        monkeypatch.setattr(constants, "DEFAULT_INTL_ENDPOINT", second)
        cache = Path.home() / "cache"
        assert names_in(fetch(cache, "org/other").root) == {"config.json"}
        assert fetch(cache).root.parts[-3] == "org--name"
        with pytest.raises(ModelError, match="no repository org/none"):
            fetch(cache, "org/none")


def test_unchanged_files_are_not_verified_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a whole model at each start would take minutes."""
    fetch(cache)

    def no_hash(*arguments: object, **more: object) -> bool:
        raise AssertionError("a file was verified again")

    monkeypatch.setattr("modelscope_hub._download.DownloadManager._cache_hit", no_hash)
    fetch(cache)


def test_damaged_content_is_an_error_and_leaves_nothing(site: FakeModelScope, cache: Path) -> None:
    site.damaged = set(WEIGHTS)
    with pytest.raises(ModelError, match=r"org/name: the download of model-0.* failed: .*again"):
        fetch(cache)
    assert not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize("path", ["../x.json", "a/../../x.json", "/etc/x.json", "a\\..\\x.json"])
def test_names_that_point_outside_are_refused(site: FakeModelScope, cache: Path, path: str) -> None:
    site.repositories["org/name"]["master"][path] = b"{}"
    with pytest.raises(ModelError, match="org/name is refused"):
        fetch(cache)
    assert not site.reads


@pytest.mark.parametrize("name", ["name", "../name", "org/..", "org/name/more", "org/", "a b/c"])
def test_names_that_are_no_repository(cache: Path, name: str) -> None:
    with pytest.raises(ModelError, match="expected org/name or org/name@revision"):
        fetch(cache, name)


@pytest.mark.parametrize("revision", ["", "..", "../x", "/x", "a//b", "a b"])
def test_revisions_that_are_none(cache: Path, revision: str) -> None:
    with pytest.raises(ModelError, match="is not a revision"):
        fetch(cache, f"org/name@{revision}")


def test_two_revisions_are_a_contradiction(cache: Path) -> None:
    with pytest.raises(ModelError, match="leave out one of them"):
        fetch(cache, "org/name@v1", revision="v2")


def test_the_users_cache_is_used_if_there_is_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch(cache, is_chosen=True).root.parts[: len(cache.resolve().parts) + 1] == (
        *cache.resolve().parts,
        "models",
    )
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "own"))
    assert fetch(cache).root.is_relative_to((tmp_path / "own").resolve())
    monkeypatch.delenv("MODELSCOPE_CACHE")
    own = Path.home() / ".cache" / "modelscope"
    (own / "models").mkdir(parents=True)
    assert fetch(cache).root.is_relative_to(own.resolve())


def test_progress_counts_the_bytes_of_each_file(cache: Path) -> None:
    steps: dict[str, tuple[int, int | None]] = {}

    def report(what: str, done: int, total: int | None) -> None:
        steps[what] = (done, total)

    source = ModelScopeSource(None, ModelSourceSetup(cache))
    source.fetch(ModelReference("modelscope", "org/name"), FileFilter(), report)
    assert steps["model-00001-of-00001.safetensors"] == (7, 7)


# --- tokens and errors ----------------------------------------------------------------------------


def test_only_the_token_of_modelscope_is_sent(
    site: FakeModelScope, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.private = {"org/name"}
    with pytest.raises(ModelError, match=r"no repository org/name .*set MODELSCOPE_API_TOKEN"):
        fetch(cache, token="secret")
    assert "secret" not in str(site.headers)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    assert names_in(fetch(cache).root)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "wrong")
    with pytest.raises(ModelError, match=r"gives no access: .*the one that was sent is not"):
        fetch(cache)


def test_an_unknown_revision_says_which_there_are(cache: Path) -> None:
    with pytest.raises(ModelError, match="org/name has no revision 'v9'; it has master, v1"):
        fetch(cache, "org/name@v9")


def test_an_unknown_model(cache: Path) -> None:
    with pytest.raises(ModelError, match="no repository org/none .*check the spelling"):
        fetch(cache, "org/none")


@pytest.mark.parametrize(
    ("status", "message"),
    [(500, "try again later"), (403, "gives no access: set MODELSCOPE_API_TOKEN")],
)
def test_a_server_with_trouble(
    site: FakeModelScope, cache: Path, status: int, message: str
) -> None:
    site.status = status
    with pytest.raises(ModelError, match=message) as caught:
        fetch(cache)
    assert caught.value.__suppress_context__ and "\n" not in str(caught.value)


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match=r"127\.0\.0\.1:1 cannot be reached: check the network"):
        fetch(cache)
    monkeypatch.setenv("PEGBOARD_LOG_LEVEL", "DEBUG")
    with pytest.raises(ModelError) as caught:
        fetch(cache)
    assert caught.value.__cause__ is not None


def test_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"org/name is not in the cache .*offline"):
        fetch(cache, offline=True)
    root = fetch(cache).root
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:1")
    assert fetch(cache, offline=True).root == root
    with pytest.raises(ModelError, match=r"org/name at revision 'v1' is not in the cache"):
        fetch(cache, "org/name@v1", offline=True)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match="org/name: the download failed"):
        fetch(tmp_path / "cache")


def test_nothing_is_written_to_the_home(site: FakeModelScope, cache: Path) -> None:
    """The library would write a number that marks this installation."""
    fetch(cache)
    assert "session_id" in site.headers["user-agent"]
    assert not list(Path.home().rglob("*"))
