"""What the engines that share a folder say about themselves. It imports no torch.

    <folder>/<identity>/engine.json    the facts of the engines with this identity

An engine that finds no block of its own in the folder, but blocks of others, says in what it
differs from them. Without this, its hit rate would be 0 and nobody would know why.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from itertools import islice

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.log import get_logger
from pegboard_kv.facts import (
    MAX_BYTES,
    decode_facts,
    describe_difference,
    differences,
    encode_facts,
)
from pegboard_kv_connector_shared_storage.folder import (
    FACTS_FILE,
    TEMPORARY,
    BlockFolder,
    has_blocks,
)
from pegboard_kv_connector_shared_storage.options import SharedStorageOptions

log = get_logger(__name__)

MAX_NEIGHBOURS = 100
"""Other engines that are looked at. A folder may have thousands."""


def introduce(folder: BlockFolder, options: SharedStorageOptions, setup: KVConnectorSetup) -> None:
    """Warn if the folder has blocks, but none that this engine can load, and write this engine's
    facts. Neither can fail."""
    facts = setup.plan.facts
    if not has_blocks(folder.home):
        others = list(islice(_neighbours(folder), MAX_NEIGHBOURS))
        if others:
            log.warning("%s", _advice(folder, options, facts, others))
    if options.role != "kv_consumer" and facts:
        _write(os.path.join(folder.home, FACTS_FILE), encode_facts(facts))


def _advice(
    folder: BlockFolder,
    options: SharedStorageOptions,
    facts: dict[str, str],
    others: list[dict[str, str] | None],
) -> str:
    known = [other for other in others if other is not None]
    if known:
        closest = min(known, key=lambda other: len(differences(facts, other)))
        reason = describe_difference(facts, closest, "the folder")
    else:
        reason = "they do not say in what they differ"
    action = (
        "start it with the same settings"
        if options.role == "kv_consumer"
        else "start it with the same settings if it is to load them; otherwise its own blocks are "
        "stored beside them"
    )
    return (
        f"{folder.root} has KV blocks of other engines only, which this engine cannot load: "
        f"{reason}; {action}"
    )


def _neighbours(folder: BlockFolder) -> Iterator[dict[str, str] | None]:
    """Yield the facts of every other identity that has blocks, or None if they cannot be read."""
    try:
        entries = os.scandir(folder.root)
    except OSError:
        return
    with entries:
        for entry in entries:
            is_other = entry.path != folder.home and entry.is_dir(follow_symlinks=False)
            if is_other and has_blocks(entry.path):
                yield _read(os.path.join(entry.path, FACTS_FILE))


def _read(path: str) -> dict[str, str] | None:
    """Return the facts in a file, or None if it is not a small regular file of facts."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return decode_facts(os.read(descriptor, MAX_BYTES + 1)) if is_regular else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _write(path: str, content: bytes) -> None:
    temporary = f"{path}.{secrets.token_hex(8)}{TEMPORARY}"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        log.debug("%s cannot be written: %s", path, error)
        try:
            os.unlink(temporary)
        except OSError:
            log.debug("%s cannot be deleted", temporary)
