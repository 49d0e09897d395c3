"""Model sources `s3` and `gs`: a folder of a bucket is fetched into the cache.

A folder of the cache has the files, a lock, and `.objects.json`, which says which version of each
object was fetched. A file appears only when it is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSourceSetup,
    Progress,
)
from pegboard_model_source_object_storage.stores import (
    GoogleStore,
    S3Store,
    Store,
    StoredObject,
)
from pegboard_weights.repository_files import PICKLED, SETTINGS, pickled_weights

WEIGHTS = ("*.safetensors", "*.gguf", "*.tensors")
RECORD = ".objects.json"
LOCK = ".lock"
UNSAFE = ("\\", ":", "\0")


class BucketSource:
    """Accepts "//bucket/folder", as after the scheme of a URL."""

    scheme: str
    store: type[Store]

    def __init__(self, options: None, setup: ModelSourceSetup) -> None:
        self.setup = setup

    def fetch(
        self, reference: ModelReference, wanted: FileFilter, progress: Progress
    ) -> LocalFiles:
        bucket, prefix = self._place(reference)
        folder = self.setup.cache_dir / self.scheme / bucket / prefix
        url = f"{self.scheme}://{bucket}/{prefix}"
        if self.setup.offline:
            record = _record(folder)
        else:
            store = self.store()
            key_start = f"{prefix}/" if prefix else ""
            listed = {
                one.key.removeprefix(key_start): one
                for one in store.objects(bucket, key_start)
                if one.key.startswith(key_start) and not one.key.endswith("/")
            }
            chosen = self._chosen(url, listed, reference.file, wanted)
            record = self._download(store, bucket, chosen, folder, progress) if chosen else {}
        if not record:
            reason = (
                "is not in the cache, and downloads are off (offline: HF_HUB_OFFLINE or "
                "TRANSFORMERS_OFFLINE is set); run once without it"
                if self.setup.offline
                else "has no files of a model directly in it; check the bucket and the folder"
            )
            raise ModelError(f"{url} {reason}")
        return LocalFiles(self._model_in(url, folder, reference.file).resolve())

    def _place(self, reference: ModelReference) -> tuple[str, str]:
        """Return the bucket and the folder in it."""
        bucket, _, prefix = reference.name.removeprefix("//").partition("/")
        prefix = prefix.strip("/")
        is_url = reference.name.startswith("//") and not bucket.startswith(".")
        if not is_url or not bucket or _is_unsafe(f"{bucket}/{prefix}"):
            raise ModelError(
                f"{self.scheme}:{reference.name} is no folder of a bucket; expected "
                f"{self.scheme}://bucket/folder"
            )
        if reference.revision is not None:
            raise ModelError(
                f"{self.scheme}:{reference.name}: a bucket has no revisions; leave out revision "
                f"{reference.revision!r}"
            )
        return bucket, prefix

    def _chosen(
        self, url: str, listed: dict[str, StoredObject], file: str | None, wanted: FileFilter
    ) -> dict[str, StoredObject]:
        """Return the objects to fetch, by their name in the folder. Raises ModelError for a name
        that points outside."""
        for name in listed:
            if _is_unsafe(name):
                raise ModelError(
                    f"{url} is refused: the name {name!r} points outside of its folder"
                )
        names = [name for name in listed if "/" not in name and not name.startswith(".")]

        def matching(patterns: tuple[str, ...]) -> set[str]:
            return {name for name in names if any(fnmatchcase(name, one) for one in patterns)}

        if wanted.patterns:
            matches = matching(wanted.patterns)
        elif file is not None:
            matches = matching(SETTINGS) | ({file} & set(names))
        else:
            pickled = {pattern for group in PICKLED for pattern in group}
            weights = {*WEIGHTS, *self.setup.weight_patterns} - pickled
            matches = matching(tuple(weights)) - matching(SETTINGS)
            matches |= matching(SETTINGS) | set(() if matches else pickled_weights(names, pickled))
        return {name: listed[name] for name in sorted(matches)}

    def _download(
        self,
        store: Store,
        bucket: str,
        chosen: dict[str, StoredObject],
        folder: Path,
        progress: Progress,
    ) -> dict[str, Any]:
        """Fetch what is missing or has changed. Return the record of the folder."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / LOCK):
                record = _record(folder)
                for name, one in chosen.items():
                    path = folder / name
                    if record.get(name) == [one.size, one.version] and path.is_file():
                        continue
                    _write(path, store.chunks(bucket, one.key), one.size, progress)
                    record[name] = [one.size, one.version]
                    _write(folder / RECORD, iter([json.dumps(record).encode()]), None, progress)
        except OSError as error:
            raise ModelError(
                f"cannot write the cache {folder}: {error.strerror or error}; name another folder "
                "with --download-dir or PEGBOARD_CACHE"
            ) from error
        return record

    def _model_in(self, url: str, folder: Path, file: str | None) -> Path:
        if file is None:
            ggufs = sorted(folder.glob("*.gguf"))
            has_config = any((folder / name).is_file() for name in ("config.json", "params.json"))
            return ggufs[0] if len(ggufs) == 1 and not has_config else folder
        if _is_unsafe(file) or "/" in file or not (folder / file).is_file():
            raise ModelError(f"{url} contains no file {file!r}")
        return folder / file if file.lower().endswith(".gguf") else folder


class S3Source(BucketSource):
    scheme = "s3"
    store = S3Store


class GoogleSource(BucketSource):
    scheme = "gs"
    store = GoogleStore


def _is_unsafe(name: str) -> bool:
    parts = name.split("/")
    return ".." in parts or "." in parts or any(mark in name for mark in UNSAFE) or name[:1] == "/"


def _record(folder: Path) -> dict[str, Any]:
    """Return name → [bytes, version] of the files that were fetched, or {} if that is damaged."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file, so that only one process fetches into its folder. The operating system releases
    it when its holder dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, chunks: Iterator[bytes], total: int | None, progress: Progress) -> None:
    """Write a file that appears only when it is complete. total: its bytes, which are checked."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    done = 0
    try:
        with os.fdopen(number, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                done += len(chunk)
                if total is not None and done > total:
                    break  # the object has changed
                if total is not None:
                    progress(path.name, done, total)
            if total not in (None, done):
                raise ModelError(f"{path.name} has {done} bytes instead of {total}; run again")
            os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
