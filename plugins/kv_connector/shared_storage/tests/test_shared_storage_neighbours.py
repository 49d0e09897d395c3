"""An engine that cannot load what is in the folder says why. Nothing in the folder can harm it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pegboard_kv_connector_shared_storage.folder import FACTS_FILE, BlockFolder
from pegboard_kv_connector_shared_storage.options import SharedStorageOptions
from pegboard_kv_connector_shared_storage.scheduler import SharedStorageScheduler
from pegboard_kv_connector_shared_storage.worker import SharedStorageWorker

from pegboard.engine.actions import ResetPrefixCache
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_testing.contract_kv_connector import Halves, KVConnectorContract, greedy
from pegboard_testing.fake_engine import FakeEngine

FACTS = {"checkpoint": "Llama sha256:1", "dtype": "float32", "layout": "native 1"}
OTHER = {"checkpoint": "Llama sha256:1", "dtype": "bfloat16", "layout": "native 1"}
BLOCK = b"\1" * 32


def setup(identity: str, facts: dict[str, str]) -> KVConnectorSetup:
    plan = FakeEngine().plan
    changed = type(plan)(
        plan.groups, plan.num_blocks, plan.block_bytes, plan.hash_block_size, identity, facts
    )
    return KVConnectorSetup(changed, expired=[lambda end: range(0) for _ in plan.groups])


def start(
    path: Path,
    identity: str = "a",
    facts: dict[str, str] = FACTS,
    *,
    has_block: bool = True,
    **options: object,
) -> BlockFolder:
    """Start an engine, and let it save a block."""
    chosen = SharedStorageOptions(shared_storage_path=path, **options)
    SharedStorageScheduler(chosen, setup(identity, facts))
    folder = BlockFolder.open(chosen, setup(identity, facts))
    if has_block:
        folder.write(0, BLOCK, [b"block"])
    return folder


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return messages


def test_an_engine_that_differs_says_in_what(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path)
    assert not warnings(caplog), "the folder was empty"
    assert json.loads((tmp_path / "a" / FACTS_FILE).read_text()) == FACTS
    start(tmp_path)
    assert not warnings(caplog), "it finds its own blocks"
    start(tmp_path, "b", OTHER, has_block=False)
    (message,) = warnings(caplog)
    assert message == (
        f"{tmp_path} has KV blocks of other engines only, which this engine cannot load: dtype: "
        "this engine has bfloat16, the folder has float32; start it with the same settings if it "
        "is to load them; otherwise its own blocks are stored beside them"
    )
    start(tmp_path, "b", OTHER)
    assert len(warnings(caplog)) == 1, "it still has no block"
    start(tmp_path, "b", OTHER)
    assert not warnings(caplog)


def test_the_closest_engine_is_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, "x", {**FACTS, "checkpoint": "other", "dtype": "float16"})
    start(tmp_path, "a", FACTS)
    start(tmp_path, "y", {"checkpoint": "third"})
    warnings(caplog)
    start(tmp_path, "b", OTHER, role="kv_consumer", has_block=False)
    (message,) = warnings(caplog)
    assert "dtype: this engine has bfloat16, the folder has float32; start it" in message
    assert "stored beside" not in message
    assert not (tmp_path / "b" / FACTS_FILE).exists(), "a consumer writes nothing"


def test_an_identity_without_blocks_is_no_neighbour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = start(tmp_path)
    folder.remove(0, BLOCK)
    start(tmp_path, "b", OTHER)
    assert not warnings(caplog)


def huge(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


def deep(file: Path) -> None:
    file.write_bytes(b'{"dtype":' + b"[" * 60_000)


def to_endless_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def to_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: list[Callable[[Path], object]] = [
    huge,
    deep,
    to_endless_link,
    to_pipe,
    to_folder,
    Path.unlink,
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(b"\xff\xfe{"),
    lambda file: file.write_text("[1, 2]"),
    lambda file: file.write_text('{"dtype": 3}'),
    lambda file: file.write_text('{"dtype": "\\ud800"}'),
    lambda file: file.write_text(json.dumps({str(number): "" for number in range(1000)})),
    lambda file: file.chmod(0),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_hostile_facts_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    start(tmp_path)
    damage(tmp_path / "a" / FACTS_FILE)
    began = time.perf_counter()
    start(tmp_path, "b", OTHER)
    assert time.perf_counter() - began < 2
    (message,) = warnings(caplog)
    assert "which this engine cannot load: " in message and len(message) < 800
    # the engine whose file it is writes it again, if it can
    start(tmp_path)
    file = tmp_path / "a" / FACTS_FILE
    if not file.is_dir():
        assert json.loads(file.read_text()) == FACTS and not file.is_symlink()
    assert not list(tmp_path.rglob("*.tmp"))


def test_texts_of_others_cannot_control_a_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, "a", {"dty\n\x1b[2Jpe": "x\r" * 9000})
    warnings(caplog)
    start(tmp_path, "b", OTHER)
    (message,) = warnings(caplog)
    assert message.isprintable() and len(message) < 1000


def test_the_limit_neither_counts_nor_deletes_facts(tmp_path: Path) -> None:
    for identity in "abc":
        start(tmp_path, identity, {**FACTS, "dtype": "x" * 30_000})
    mine = tmp_path / "a" / f"mine{'.tmp'}"
    abandoned = tmp_path / "a" / f"{FACTS_FILE}.1234.tmp"
    for file in (mine, abandoned):
        file.write_text("")
        os.utime(file, (1, 1))
    for file in tmp_path.rglob(FACTS_FILE):
        os.utime(file, (1, 1))
    folder = start(tmp_path, "d", max_size_gb=25 / 2**30, has_block=False)
    folder.write(0, BLOCK, [b"block"])
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4, "20 bytes of blocks are few enough"
    folder.write(0, BLOCK[::-1] + b"\2", [b"block" * 2])
    assert len(list(tmp_path.rglob("*.safetensors"))) < 5
    assert len(list(tmp_path.rglob(FACTS_FILE))) == 4
    assert mine.exists() and not abandoned.exists()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_only_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path)
    (tmp_path / "b" / "rank0").mkdir(parents=True)
    (tmp_path / "b").chmod(0o500)
    try:
        start(tmp_path, "b", OTHER, role="kv_consumer", has_block=False)
        assert len(warnings(caplog)) == 1
    finally:
        (tmp_path / "b").chmod(0o700)


def test_a_full_disk_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, destination: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    start(tmp_path, has_block=False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_new_weights_change_neither_the_facts_nor_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After an update, blocks have other names in the same folder, and the facts are those of the
    start."""
    options = SharedStorageOptions(shared_storage_path=tmp_path)

    class Connected(KVConnectorContract):
        def halves(self, given: KVConnectorSetup) -> Halves:
            scheduler = SharedStorageScheduler(options, setup("a", FACTS))
            return scheduler, SharedStorageWorker(options, given)

    engine = Connected().engine(identity="a")
    engine.generate(range(21), greedy(2))
    engine.engine._live.weights_changed("sha256:2")
    assert engine.ask(ResetPrefixCache())
    engine.generate(range(21), greedy(2))
    Connected().close(engine)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 10
    assert json.loads((tmp_path / "a" / FACTS_FILE).read_text()) == FACTS
    start(tmp_path)
    assert not warnings(caplog)
