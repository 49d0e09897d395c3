"""`pegboard plugins lock`, `diff` and `sync`, and a start with a lock."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegboard.cli.main import command_setup
from pegboard.config.schema import PluginConfig, Settings
from pegboard.errors import ConfigError
from pegboard.plan.engine_plan import resolve
from pegboard.plugins import discovery, lockfile
from pegboard_doctor.lock import Diff, Lock, Sync
from pegboard_testing.fake_distributions import FakeDistributions, spec_source
from pegboard_testing.tiny_engine import CONFIG

COMMANDS: dict[str, Callable[..., Any]] = {"lock": Lock, "diff": Diff, "sync": Sync}


@pytest.fixture
def fakes(
    fake_distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> FakeDistributions:
    monkeypatch.setattr(discovery, "scan", fake_distributions.scan)
    fake_distributions.add(
        "acme",
        {"sampler": {"one": "locked_one:ONE"}},
        {"locked_one": spec_source("sampler", "ONE")},
    )
    fake_distributions.add(
        "other",
        {"sampler": {"two": "locked_two:TWO"}},
        {"locked_two": spec_source("sampler", "TWO")},
    )
    return fake_distributions


def run(action: str, *words: str) -> int:
    return COMMANDS[action](None, command_setup(f"plugins-{action}")).run(words)


def test_every_change_is_found(
    fakes: FakeDistributions,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = str(tmp_path / "lock.json")
    assert run("lock", file) == 0
    locked = json.loads(Path(file).read_text())
    assert (
        locked["distributions"]["acme"]["plugins"] == ["sampler:one"]
        and locked["distributions"]["acme"]["version"] == "1.0"
    )
    assert "numpy" in locked["requirements"], "what pegboard needs is pinned"
    capsys.readouterr()
    assert run("diff", file) == 0 and capsys.readouterr().out == "nothing differs\n"
    assert run("sync", file) == 0 and capsys.readouterr().out == "nothing to do\n"

    fakes.write(locked_one=spec_source("sampler", "ONE") + "\n# changed\n")
    next(fakes.root.glob("other-*")).joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: other\nVersion: 1.1\n"
    )
    fakes.add(
        "third",
        {"sampler": {"three": "locked_three:THREE"}},
        {"locked_three": spec_source("sampler", "THREE")},
    )
    locked["requirements"]["numpy"] = "0.1"
    Path(file).write_text(json.dumps(locked))
    assert run("diff", file) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == [
        "acme 1.0: its files differ from the locked ones",
        "other: 1.0 is locked, 1.1 is installed",
        "third 1.0 is installed, but not locked",
    ]
    assert told[3].startswith("numpy: 0.1 is locked, ") and len(told) == 4
    with pytest.raises(
        ConfigError,
        match=r"(?s)the plugins differ from .*acme 1.0: its files.*run pegboard plugins sync",
    ):
        resolve(Settings(plugins=PluginConfig(lock=file)))
    assert run("sync", file) == 0
    install, uninstall = capsys.readouterr().out.splitlines()
    assert install.endswith("install --no-deps --force-reinstall acme==1.0 other==1.0 numpy==0.1")
    assert uninstall.endswith("uninstall --yes third")

    ran: list[list[str]] = []

    def runs(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0 if len(ran) < 3 else 1)

    monkeypatch.setattr(subprocess, "run", runs)
    assert run("sync", file, "--yes") == 1, "the status is that of the last comparison"
    assert (
        ran[0][-1] == "numpy==0.1"
        and ran[1][-1] == "third"
        and ran[2][-3:] == ["plugins", "diff", file]
    )


def test_a_file_cannot_be_locked(
    fakes: FakeDistributions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    locked = str(tmp_path / "lock.json")
    config = tmp_path / "config.toml"
    file.write_text('class Mine:\n    plugin = "sampler:mine"\n')
    assert run("lock", locked) == 0
    with pytest.raises(ConfigError, match="mine-py is not installed, so it cannot be locked"):
        resolve(Settings(plugins=PluginConfig(lock=locked, files=[str(file)])))
    config.write_text(f'plugins.files = ["{file}"]')
    monkeypatch.setenv("PEGBOARD_CONFIG", str(config))
    with pytest.raises(ConfigError, match="a file cannot be locked: make it a package"):
        run("lock", locked)


def test_a_denied_plugin_is_not_part_of_the_set(
    fakes: FakeDistributions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('plugins.deny = ["other"]\nplugins.lock = "no such file"\n')
    monkeypatch.setenv("PEGBOARD_CONFIG", str(config))
    file = tmp_path / "lock.json"
    assert run("lock", str(file)) == 0, (
        "the lock of the rules does not stop the command that makes one"
    )
    assert sorted(json.loads(file.read_text())["distributions"]) == ["acme", "pegboard"]
    assert run("diff", str(file)) == 0
    config.write_text("")
    assert run("diff", str(file)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as a lock file"),
        ('{"format": 2, "distributions": {}}', "format"),
        ('{"format": 1, "distributions": {"a": {"version": "1"}}}', "digest"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lock.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        lockfile.read(tmp_path / "lock.json")
    with pytest.raises(ConfigError, match="cannot be read as a lock file"):
        lockfile.read(tmp_path / "missing.json")


def fails(file: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(Settings(plugins=PluginConfig(lock=file)))


def test_kits_are_pinned_by_their_files(
    fakes: FakeDistributions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.add("acme-kit", {}, {"acme_kit": "x = 1\n"}, requires=["pegboard>=0.1"])
    fakes.add(
        "more",
        {"sampler": {"more": "locked_more:MORE"}},
        {"locked_more": "MORE = 1\n"},
        requires=["acme-kit"],
    )
    file = str(tmp_path / "lock.json")
    assert run("lock", file) == 0
    locked = json.loads(Path(file).read_text())
    assert (
        locked["distributions"]["acme-kit"]["plugins"] == []
        and "acme-kit" not in locked["requirements"]
    )
    assert run("diff", file) == 0
    fakes.write(acme_kit="x = 2\n")
    fails(file, "acme-kit 1.0: its files differ from the locked ones")
    capsys.readouterr()
    assert (
        run("diff", file) == 1
        and capsys.readouterr().out == "acme-kit 1.0: its files differ from the locked ones\n"
    )


def test_code_beside_the_locked_files_is_noticed(fakes: FakeDistributions, tmp_path: Path) -> None:
    fakes.add("whole", {"sampler": {"w": "locked_whole.spec:SPEC"}})
    package = fakes.root / "locked_whole"
    package.mkdir()
    for name in ("__init__", "spec"):
        (package / f"{name}.py").write_text("x = 1\n")
    file = str(tmp_path / "lock.json")
    assert run("lock", file) == 0
    legacy = package / "late.pyc"
    legacy.write_bytes(b"any")
    fails(file, "whole 1.0: its files differ")
    legacy.unlink()

    (package / "vendored").symlink_to(tmp_path)
    fails(file, "vendored is a link, which cannot be locked")
    (package / "vendored").unlink()

    fakes.add("guest", {})
    record = next(fakes.root.glob("guest-*")) / "RECORD"
    record.write_text("locked_whole/guest.py,sha256=x,1\n")
    fails(
        file,
        (
            "guest has installed files in the package locked_whole of whole, so it cannot be "
            "locked: uninstall one"
        ),
    )
    record.write_text("locked_wholes/guest.py,sha256=x,1\n")
    assert run("diff", file) == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("to", ["other.py", "sub/spec.py", "spec.pyx"])
def test_a_file_with_another_name_is_another_file(
    fakes: FakeDistributions, tmp_path: Path, to: str
) -> None:
    fakes.add("whole", {"sampler": {"w": "locked_whole.spec:SPEC"}})
    package = fakes.root / "locked_whole"
    (package / "sub").mkdir(parents=True)
    for name in ("__init__", "spec"):
        (package / f"{name}.py").write_text("x = 1\n")
    file = str(tmp_path / "lock.json")
    assert run("lock", file) == 0
    (package / "spec.py").rename(package / to)
    fails(file, "whole 1.0: its files differ")
    (package / to).rename(package / "spec.py")
    assert run("diff", file) == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_bytecode_of_another_source_is_refused(
    fakes: FakeDistributions, tmp_path: Path, mode: py_compile.PycInvalidationMode
) -> None:
    source = fakes.root / "locked_one.py"
    file = str(tmp_path / "lock.json")
    own = source.read_text()
    cached = Path(py_compile.compile(str(source), invalidation_mode=mode) or "")
    assert run("lock", file) == 0 and run("diff", file) == 0
    status = source.stat()
    header = cached.read_bytes()[:16]
    source.write_text("print('poison')")
    cached.write_bytes(
        header
        + Path(py_compile.compile(str(source), str(tmp_path / "p.pyc")) or "").read_bytes()[16:]
    )
    source.write_text(own)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    fails(
        file,
        (
            "locked_one.*pyc is not the bytecode of .*locked_one.py, but Python would run it: "
            "delete it"
        ),
    )
    cached.write_bytes(header + b"no code")
    fails(file, "is not the bytecode of")
    cached.write_bytes(b"old!" + header[4:])
    assert run("diff", file) == 0, "Python ignores it"


def test_modules_that_run_at_the_start_of_python_are_pinned(
    fakes: FakeDistributions, tmp_path: Path
) -> None:
    file = str(tmp_path / "lock.json")
    assert run("lock", file) == 0
    fakes.write(usercustomize="x = 1\n")
    fails(file, r"usercustomize \(run by Python at its start\) is installed, but not locked")
    with pytest.raises(ConfigError, match="pip does not manage this module"):
        run("sync", file)
    assert run("lock", file) == 0 and run("diff", file) == 0
    fakes.write(usercustomize="x = 2\n")
    fails(file, r"usercustomize \(run by Python at its start\): its files differ")


def test_what_came_from_a_folder_is_restored_from_there(
    fakes: FakeDistributions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my acme"
    file = str(tmp_path / "lock.json")
    origin = next(fakes.root.glob("acme-*")) / "direct_url.json"
    origin.write_text(json.dumps({"dir_info": {"editable": True}, "url": folder.as_uri()}))
    assert run("lock", file) == 0
    fakes.write(locked_one=spec_source("sampler", "ONE") + "\n# changed\n")
    with pytest.raises(
        ConfigError,
        match="acme 1.0 was installed from .*my acme, which is not a package here: install it",
    ):
        run("sync", file)
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    capsys.readouterr()
    assert run("sync", file) == 0
    assert (
        capsys.readouterr().out.rstrip().endswith(f"install --no-deps --force-reinstall '{folder}'")
    )


def test_only_regular_files_are_read(tmp_path: Path, fakes: FakeDistributions) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(
            ConfigError,
            match="cannot be read as a lock file of plugins: .*; see pegboard plugins lock",
        ):
            lockfile.read(path)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="is larger than"):
        lockfile.read(tmp_path / "huge")
    with pytest.raises(ConfigError, match="cannot be written: Is a directory; name another file"):
        run("lock", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "version"), [("--index-url=http://x", "1"), ("acme", "1 --index-url=x")]
)
def test_nothing_but_pins_reaches_pip(
    fakes: FakeDistributions, tmp_path: Path, name: str, version: str
) -> None:
    locked = {
        "format": 1,
        "distributions": {name: {"version": version, "digest": "", "plugins": []}},
    }
    (tmp_path / "lock.json").write_text(json.dumps(locked))
    with pytest.raises(ConfigError, match="the lock file names"):
        run("sync", str(tmp_path / "lock.json"))


def test_choices_for_a_model_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the plugins that are really installed."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    file = tmp_path / "lock.json"
    assert run("lock", str(file), "--model", str(tmp_path)) == 0
    locked = json.loads(file.read_text())
    (model,) = [made for made in locked["decisions"] if made["kind"] == "model"]
    assert model["key"] == model["winner"]["name"] == "LlamaForCausalLM"
    model["winner"]["distribution"] = "acme"
    file.write_text(json.dumps(locked))
    capsys.readouterr()
    assert run("diff", str(file)) == 1
    told = capsys.readouterr().out
    assert (
        "model LlamaForCausalLM: acme:LlamaForCausalLM was chosen for" in told
        and len(told.splitlines()) == 1
    )
