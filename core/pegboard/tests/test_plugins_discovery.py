"""Discovery reads only metadata, keeps entries that it cannot use with the reason, and does not
depend on the install order."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.errors import PluginNotFound
from pegboard.installed import normalized
from pegboard.interfaces import KINDS
from pegboard.plugins.defaults import catalogue, default_name, provider
from pegboard.plugins.discovery import Scan, outdated, scan_path
from pegboard.plugins.names import to_install
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_distributions import FakeDistributions


@pytest.fixture
def fakes(tmp_path: Path) -> FakeDistributions:
    return FakeDistributions(tmp_path)


def test_entry_carries_its_ids(fakes: FakeDistributions) -> None:
    fakes.add("Acme_Attention", {"attention": {"fast": "acme:FAST"}}, version="2.1")
    (entry,) = fakes.scan().entries
    assert entry.id == "attention:fast (acme-attention 2.1)"
    assert entry.qualified == "acme-attention:fast"
    assert entry.group == "pegboard.attention.v1"


def test_distributions_without_our_groups_are_not_there(fakes: FakeDistributions) -> None:
    fakes.add("empty", {"sampler": {}})
    other = fakes.root / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[console_scripts]\nother = pegboard.tool:main\n")
    fakes.add("acme", {"sampler": {"s": "acme:S"}})
    assert [entry.distribution for entry in fakes.scan().entries] == ["acme"]


def test_entries_of_other_interfaces_are_kept_with_a_reason(fakes: FakeDistributions) -> None:
    fakes.add(
        "acme",
        {
            "pegboard.attention.v9": {"next": "acme:A"},
            "pegboard.attention.v0": {"old": "acme:B"},
            "pegboard.atention.v1": {"typo": "acme:C"},
            "pegboard.strange": {"odd": "acme:D"},
            "attention": {"good": "acme:E"},
        },
    )
    scan = fakes.scan()
    assert [entry.name for entry in scan.entries] == ["good"]
    reasons = {item.entry.name: item.reason for item in scan.unusable}
    assert "upgrade pegboard" in reasons["next"]
    assert "upgrade acme" in reasons["old"]
    assert "unknown kind 'atention'" in reasons["typo"]
    assert "not of the form" in reasons["odd"]


def test_the_major_version_before_is_served(fakes: FakeDistributions) -> None:
    """If the kind says how. Of a plugin for both versions, the newer one counts."""
    fakes.add(
        "acme",
        {
            "pegboard.pooler.v1": {"oldest": "acme:A"},
            "pegboard.pooler.v2": {"old": "acme:B", "both": "acme:C"},
            "pegboard.pooler.v3": {"both": "acme:D"},
            "pegboard.sampler.v0": {"other": "acme:E"},
        },
    )
    scan = fakes.scan()
    entries = {entry.name: entry for entry in scan.entries}
    assert {name: entry.value for name, entry in entries.items()} == {
        "old": "acme:B",
        "both": "acme:D",
    }
    assert outdated(entries["old"]).endswith("pegboard has v3: upgrade acme")
    assert outdated(entries["both"]) == ""
    assert {item.entry.name for item in scan.unusable} == {"oldest", "other"}


def test_of_duplicates_the_first_counts(tmp_path: Path) -> None:
    for folder, version in (("first", "1.0"), ("stale", "0.9")):
        FakeDistributions(tmp_path / folder).add(
            "acme", {"sampler": {"s": "acme:S"}}, version=version
        )
    folders = [str(tmp_path / "first"), str(tmp_path / "stale")]
    assert [entry.version for entry in scan_path(folders).entries] == ["1.0"]
    assert [entry.version for entry in scan_path(folders[::-1]).entries] == ["0.9"]


def test_order_of_folders_does_not_matter(tmp_path: Path) -> None:
    for number in range(4):
        points = {"attention": {"a": f"m{number}:A", f"b{number}": f"m{number}:B"}}
        FakeDistributions(tmp_path / str(number)).add(f"acme-{number}", points)
    folders = [str(tmp_path / str(number)) for number in range(4)]
    assert scan_path(folders) == scan_path(folders[::-1])


def test_hooks_are_apart(fakes: FakeDistributions) -> None:
    fakes.add("acme", {"hooks": {"audit": "acme:AUDIT"}})
    scan = fakes.scan()
    assert scan.entries == () and [entry.kind for entry in scan.hooks] == ["hooks"]


def test_normalized_follows_pep_503() -> None:
    assert normalized("Acme__Model.Llama") == "acme-model-llama"


def test_without_plugins_errors_say_what_to_install() -> None:
    registry = Registry(Scan())
    for kind, names in catalogue().items():
        for name, distribution in names.items():
            with pytest.raises(PluginNotFound, match=f"pip install {distribution}"):
                registry.find(kind, name)
    with pytest.raises(PluginNotFound, match="did you mean 'attention'"):
        registry.find("attentoin", "x")


@pytest.mark.parametrize("kind", ["quantization", "sampler", "tokenizer"])
def test_the_distribution_with_the_default_is_named_first(kind: str) -> None:
    """Only six are named."""
    usual = provider(kind, default_name(kind) or "")
    assert to_install(kind).partition("pip install ")[2].startswith(str(usual))


def test_unknown_name_suggests_a_catalogued_one() -> None:
    kind, name = next(
        (kind, name) for kind, names in catalogue().items() for name in names if len(name) > 3
    )
    with pytest.raises(PluginNotFound, match=name):
        Registry(Scan()).find(kind, name + "x")


def test_importing_the_plugin_system_pulls_in_nothing_heavy() -> None:
    source = (
        "import sys, pegboard.plugins.registry, pegboard.cli.main, pegboard.cli.flags\n"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'transformers') if m in sys.modules])"
    )
    path = str(Path(__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path},
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_every_kind_has_its_spec_and_need() -> None:
    from pegboard.interfaces.spec import Need, Spec
    from pegboard.plugins.importing import import_object, need_class

    for kind in KINDS.values():
        assert issubclass(import_object(kind.spec), Spec)
        assert issubclass(need_class(kind.name), Need)


def test_damaged_metadata_is_left_out(fakes: FakeDistributions) -> None:
    fakes.add("acme", {"sampler": {"s": "acme:S"}}, version="1.2")
    for name, metadata in (
        ("nameless", "Version: 1\n"),
        ("empty", None),
        ("odd", "Name: odd\nVersion: \xff\n"),
    ):
        damaged = fakes.root / f"{name}-1.dist-info"
        damaged.mkdir()
        (damaged / "entry_points.txt").write_text(
            f"# note = x\n\n[pegboard.sampler.v1]\n{name}=acme:S\n\n[other]\na = b\n"
        )
        if metadata is not None:
            (damaged / "METADATA").write_text(metadata, "latin-1")
    assert [(entry.name, entry.value) for entry in fakes.scan().entries] == [("s", "acme:S")]


def test_zip_files_are_searched(tmp_path: Path) -> None:
    fakes = FakeDistributions(tmp_path / "folder")
    fakes.add("acme", {"sampler": {"s": "acme:S"}}, version="1.2")
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", fakes.root)
    (tmp_path / "none.txt").write_text("not an archive")
    scan = scan_path([str(tmp_path / "none.txt"), str(tmp_path / "missing"), "", archive])
    assert scan == fakes.scan() and scan.entries[0].version == "1.2"
