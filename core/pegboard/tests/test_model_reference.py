"""Which model reference a text stands for, and the error if it stands for none."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.errors import ModelError, PluginBroken, PluginNotFound
from pegboard.interfaces.model_source import ModelReference, ModelSourceSpec
from pegboard.interfaces.weight_loader import WeightLoaderSpec
from pegboard.plan.model_reference import parse_reference, split_reference

SCHEMES = {
    "disk": frozenset({"directory"}),
    "hugging": frozenset({"default"}),
    "index": frozenset(),
}


def _split(text: str, revision: str | None = None) -> ModelReference:
    return split_reference(text, revision, SCHEMES, (".gguf", ".bin"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("hugging", "org/name", None)),
        ("org-1/Name.2_x", ("hugging", "org-1/Name.2_x", None)),
        ("org/name:model.gguf", ("hugging", "org/name", "model.gguf")),
        ("org/name:Q4_K_M", ("hugging", "org/name", "Q4_K_M")),
        ("hugging:org/name:IQ3_XXS", ("hugging", "org/name", "IQ3_XXS")),
        ("org/name:sub/model.Q4_1.gguf", ("hugging", "org/name", "sub/model.Q4_1.gguf")),
        ("index:pack-age", ("index", "pack-age", None)),
        ("index:pack-age==0.1.2", ("index", "pack-age==0.1.2", None)),
        ("index:pack-age:model.gguf", ("index", "pack-age", "model.gguf")),
        ("hugging:org/name:m.gguf", ("hugging", "org/name", "m.gguf")),
        ("hugging:org/name.gguf", ("hugging", "org/name.gguf", None)),
        ("disk:some/dir", ("disk", "some/dir", None)),
        ("./missing", ("disk", "./missing", None)),
        ("../missing", ("disk", "../missing", None)),
        ("/missing/dir", ("disk", "/missing/dir", None)),
        ("~/missing", ("disk", "~/missing", None)),
        (".", ("disk", ".", None)),
        ("missing.gguf", ("disk", "missing.gguf", None)),
        ("missing/Model.GGUF", ("disk", "missing/Model.GGUF", None)),
        ("C:\\models\\m.gguf", ("disk", "C:\\models\\m.gguf", None)),
        ("  org/name ", ("hugging", "org/name", None)),
    ],
)
def test_forms(text, expected):
    reference = _split(text, "rev")
    assert (reference.scheme, reference.name, reference.file) == expected
    assert reference.revision == "rev"


def test_what_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "plain").mkdir()
    (tmp_path / "weights").write_bytes(b"GGUF")
    assert _split("org/name").scheme == "disk"
    assert _split("weights") == ModelReference("disk", "weights")
    assert _split("plain:m.gguf") == ModelReference("disk", "plain", None, "m.gguf")
    assert _split("./org/name:m.gguf") == ModelReference("disk", "./org/name", None, "m.gguf")
    assert _split(f"{tmp_path}/plain:m.gguf") == ModelReference(
        "disk", f"{tmp_path}/plain", None, "m.gguf"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "indx:package",
            r"no installed model source is called 'indx', did you mean index:package\?",
        ),
        ("zzz:package", r"called 'zzz'; expected"),
        ("index", "index is a scheme and needs a name"),
        ("index:", "expected"),
        ("smollm2", "no such file or directory"),
        ("a/b/c", "expected a directory"),
        ("", "expected a directory"),
    ],
)
def test_other_texts_are_explained_with_all_forms(text, message):
    with pytest.raises(ModelError, match=message) as caught:
        _split(text)
    for form in ("./model", "./folder/file", "org/name", "disk:, hugging:, index:"):
        assert form in str(caught.value)


@given(st.text(max_size=20))
def test_any_text_is_parsed_or_refused(text):
    try:
        reference = _split(text)
    except ModelError:
        return
    assert reference.scheme in SCHEMES
    assert reference.name


@dataclass(frozen=True)
class Entry:
    name: str
    flags: frozenset[str] | None  # None: broken


class Registry:
    def __init__(self, *entries: Entry, loaders: tuple[Entry, ...] = ()) -> None:
        self._entries = entries
        self.loaders = loaders

    def entries(self, kind):
        assert kind in ("model_source", "weight_loader")
        return self._entries if kind == "model_source" else self.loaders

    def spec(self, entry):
        if entry.flags is None:
            raise PluginBroken("broken")
        if entry in self.loaders:
            return WeightLoaderSpec(
                api="1.0", implementation="x:Y", file_patterns=("*.Weights", "config")
            )
        return ModelSourceSpec(api="1.0", implementation="x:Y", flags=entry.flags)


def test_schemes_come_from_the_installed_sources():
    full = Registry(
        Entry("a1", frozenset()),
        Entry("b1", frozenset({"directory"})),
        Entry("c1", frozenset({"default"})),
    )
    assert parse_reference("./x", full).scheme == "b1"
    assert parse_reference("org/x", full, revision="r") == ModelReference("c1", "org/x", "r")
    assert parse_reference("a1:x", full).scheme == "a1"
    assert parse_reference("broken:x", Registry(Entry("broken", None))).scheme == "broken"


def test_what_a_file_of_weights_ends_with_comes_from_the_installed_loaders():
    disk = Entry("disk", frozenset({"directory"}))
    loaders = (Entry("w", frozenset()), Entry("broken", None))
    assert parse_reference("missing.weights", Registry(disk, loaders=loaders)) == ModelReference(
        "disk", "missing.weights"
    )
    with pytest.raises(PluginNotFound, match="not a model reference"):
        parse_reference("missing.weights", Registry(disk))


def test_missing_sources_are_named_with_what_to_install():
    with pytest.raises(
        PluginNotFound,
        match="no plugin of kind 'model_source' is installed; .*pip install pegboard-",
    ):
        parse_reference("./x", Registry())
    other = Registry(Entry("a1", frozenset()))
    with pytest.raises(
        PluginNotFound, match="no installed model source takes paths; .*pip install pegboard-"
    ):
        parse_reference("./x", other)
    with pytest.raises(
        PluginNotFound, match="takes names of the form org/name; .*pip install pegboard-"
    ):
        parse_reference("org/x", other)
    with pytest.raises(
        PluginNotFound, match="model_source 'pypi' is not installed; .*pip install pegboard-"
    ):
        parse_reference("pypi:x", other)
