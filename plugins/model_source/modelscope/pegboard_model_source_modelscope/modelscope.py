"""The model source `modelscope`: repositories of ModelScope, through the modelscope_hub library."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelscope_hub import FileInfo, HubApi, HubConfig, ProgressCallback, errors

from pegboard import env
from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSourceSetup,
    Progress,
)
from pegboard_weights.repository_files import chosen_names, is_unsafe, model_name

TOKEN = "MODELSCOPE_API_TOKEN"
SESSION = uuid.uuid4().hex
LISTED = 8
"""The most revisions that a message names."""

_NAME = re.compile(r"[\w.-]*[\w-][\w.-]*/[\w.-]*[\w-][\w.-]*")
_REVISION = re.compile(r"[\w.+-]+(/[\w.+-]+)*")

Record = dict[str, list[Any]]
"""File name → [SHA-256, size in bytes, time of modification in ns] of the files that were
verified."""


class AnonymousConfig(HubConfig):
    """The library writes a number for this installation to the user's home, and sends it with each
    request. This one is only for the process."""

    def get_session_id(self) -> str:
        return SESSION


class ModelScopeSource:
    """Accepts "org/name" and "org/name@revision". Files go to the folder that the user chose
    (`download_dir`). Without one, they go to the user's own ModelScope cache if one is configured
    or in use, otherwise below `cache_dir/modelscope`. The library resumes broken downloads,
    verifies them, and moves finished files into place.

    The token is ModelScope's. `setup.token` belongs to another hub and is never sent."""

    def __init__(self, options: None, setup: ModelSourceSetup) -> None:
        self._setup = setup

    def fetch(
        self, reference: ModelReference, wanted: FileFilter, progress: Progress
    ) -> LocalFiles:
        reference = _with_revision(reference)
        config = AnonymousConfig()
        try:
            with _translated(reference, self._setup, config):
                if self._setup.offline:
                    return self._local(reference, wanted, config)
                return self._fetched(reference, wanted, progress, config)
        except ModelError as error:
            if env.log_level() == "DEBUG":
                raise
            # the message says it all; the chain of the network's errors has a hundred lines
            raise error from None

    def _local(
        self, reference: ModelReference, wanted: FileFilter, config: HubConfig
    ) -> LocalFiles:
        root = _snapshot(HubApi(config), reference, self._setup, config)
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        chosen = self._chosen(names, reference, wanted)
        return self._files(root, chosen, reference, wanted, _record(root))

    def _fetched(
        self, reference: ModelReference, wanted: FileFilter, progress: Progress, config: HubConfig
    ) -> LocalFiles:
        # the library takes another revision from the cache if none is named
        reference = replace(reference, revision=reference.revision or "master")
        api = HubApi(config, endpoint=_site(config, reference))
        listed = _listed(api, reference)
        chosen = self._chosen(listed, reference, wanted)
        if not wanted.patterns:
            model_name(chosen, reference.file, reference.name)  # before anything is fetched
        before = None
        with contextlib.suppress(errors.CacheNotFound):
            before = _snapshot(api, reference, self._setup, config)
        record = {} if before is None else _record(before)
        news = [
            name for name in chosen if before is None or not _is_same(before, record, listed[name])
        ]
        root = api.download_repo(
            reference.name,
            "model",
            revision=reference.revision,
            cache_dir=_cache_dir(self._setup, config),
            progress_callbacks=[_reporter(progress)],
            file_list=[
                {
                    "Path": name,
                    "Size": listed[name].size or None,
                    "Sha256": listed[name].sha256,
                }
                for name in news
            ],
        )
        gone = [name for name in record if name not in listed]
        for name in gone:  # else a loader could take weights that the repository has replaced
            (root / name).unlink(missing_ok=True)
            del record[name]
        if news or gone:
            record |= {name: _entry(root, listed[name]) for name in news if listed[name].sha256}
            _write_record(root, record)
        return self._files(root, chosen, reference, wanted, record)

    def _chosen(
        self, names: Iterable[str], reference: ModelReference, wanted: FileFilter
    ) -> list[str]:
        return chosen_names(names, reference.file, wanted.patterns, self._setup.weight_patterns)

    def _files(
        self,
        root: Path,
        chosen: list[str],
        reference: ModelReference,
        wanted: FileFilter,
        record: Record,
    ) -> LocalFiles:
        root = root.resolve()
        model = None if wanted.patterns else model_name(chosen, reference.file, reference.name)
        if model is not None:
            return LocalFiles(root / model)
        digests = {
            name: f"sha256:{record[name][0]}"
            for name in chosen
            if name in record and record[name][1:] == _stamp(root / name)
        }
        return LocalFiles(root, digests)


def _site(config: HubConfig, reference: ModelReference) -> str | None:
    """Return the site that has a repository; None = that of the config."""
    try:
        return HubApi(config).resolve_endpoint_for_read(reference.name)
    except errors.NotExistError:
        raise
    except errors.APIError:
        return None  # the listing of the files says what is wrong


def _with_revision(reference: ModelReference) -> ModelReference:
    """Return the reference with the revision that its name ends with, as in "org/name@v1". Raises
    ModelError if the name or the revision cannot be one."""
    name, mark, ending = reference.name.strip().partition("@")
    if not _NAME.fullmatch(name):
        raise ModelError(
            f"{reference.name!r} is not the name of a repository, expected org/name or "
            "org/name@revision"
        )
    if mark and reference.revision not in (None, ending):
        raise ModelError(
            f"{reference.name} names the revision {ending!r}, but --revision is "
            f"{reference.revision!r}: leave out one of them"
        )
    revision = ending if mark else reference.revision
    if revision is not None and (not _REVISION.fullmatch(revision) or is_unsafe(revision)):
        raise ModelError(f"{name}: {revision!r} is not a revision")
    return replace(reference, name=name, revision=revision)


def _cache_dir(setup: ModelSourceSetup, config: HubConfig) -> Path:
    """The cache directory, in the library's own layout: the one that the user chose for Pegboard,
    else the library's own cache, if the user moved it or already keeps models there."""
    if setup.is_chosen:
        return setup.cache_dir
    place = config.cache_dir
    is_moved = place != (Path.home() / ".cache" / "modelscope").resolve()
    is_in_use = any((place / folder).is_dir() for folder in ("models", "hub"))
    return place if is_moved or is_in_use else setup.cache_dir / "modelscope"


def _snapshot(
    api: HubApi, reference: ModelReference, setup: ModelSourceSetup, config: HubConfig
) -> Path:
    """Return the folder of a repository in the cache. Raises CacheNotFound."""
    return api.download_repo(
        reference.name,
        "model",
        revision=reference.revision,
        cache_dir=_cache_dir(setup, config),
        local_files_only=True,
    )


def _listed(api: HubApi, reference: ModelReference) -> dict[str, FileInfo]:
    """Return the files of a repository by name. Raises ModelError for an unknown revision, and for
    a name that points outside."""
    try:
        infos = api.list_repo_files(reference.name, "model", revision=reference.revision)
    except errors.NotExistError:
        revisions = api.list_repo_revisions(reference.name, "model")
        names = [str(one.get("Revision") or one.get("name")) for one in revisions]
        more = ", …" if len(names) > LISTED else ""
        raise ModelError(
            f"{reference.name} has no revision {reference.revision or 'master'!r}; it has "
            f"{', '.join(names[:LISTED]) or 'none'}{more}"
        ) from None
    files = {info.path: info for info in infos if info.type != "tree"}
    for name in files:
        if is_unsafe(name):
            raise ModelError(
                f"{reference.name} is refused: the name {name!r} points outside of its folder"
            )
    return files


# --- what was verified ----------------------------------------------------------------------------


def _record_path(root: Path) -> Path:
    return root.parent / f".{root.name}.pegboard.json"


def _record(root: Path) -> Record:
    """Return what was verified in the folder of a repository, or {} if that is not known."""
    try:
        record = json.loads(_record_path(root).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    return {
        name: entry
        for name, entry in record.items()
        if isinstance(entry, list) and len(entry) == 3 and not is_unsafe(name)
    }


def _write_record(root: Path, record: Record) -> None:
    """Without the record, the library reads all files again to verify them."""
    path = _record_path(root)
    with contextlib.suppress(OSError):
        number, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(name, path)


def _entry(root: Path, info: FileInfo) -> list[Any]:
    return [info.sha256, *_stamp(root / info.path)]


def _stamp(path: Path) -> list[int]:
    """Return the size of a file in bytes and its time of modification in ns."""
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns]


def _is_same(root: Path, record: Record, info: FileInfo) -> bool:
    """Tell whether a file was verified and has not changed, here or in the repository."""
    try:
        return bool(info.sha256) and record.get(info.path) == _entry(root, info)
    except OSError:
        return False


# --- progress and errors --------------------------------------------------------------------------


def _reporter(progress: Progress) -> type[ProgressCallback]:
    """Return a class that reports the bytes of one file to `progress`."""

    class Reporter(ProgressCallback):
        def __init__(self, filename: str, file_size: int) -> None:
            super().__init__(filename, file_size)
            self._done = 0

        def update(self, size: int) -> None:
            self._done += size
            total = self.file_size or None
            done = max(0, self._done)
            progress(self.filename, done if total is None else min(done, total), total)

    return Reporter


@contextmanager
def _translated(
    reference: ModelReference, setup: ModelSourceSetup, config: HubConfig
) -> Iterator[None]:
    """Turn errors of the library, of the network and of the disk into ModelError. Subclasses come
    before their base classes."""
    name = reference.name
    try:
        yield
    except errors.CacheNotFound as error:
        at = f" at revision {reference.revision!r}" if reference.revision else ""
        raise ModelError(
            f"{name}{at} is not in the cache {_cache_dir(setup, config)}, and downloads are off "
            "(offline: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set); run once without it"
        ) from error
    except errors.FileDownloadError as error:
        first = next(iter(error.failed_files.values()), error)
        files = ", ".join(list(error.failed_files)[:LISTED])
        raise ModelError(
            f"{name}: the download of {files} failed: {_line(first)}; "
            f"{_advice(first, setup, config)}"
        ) from error
    except errors.NotExistError as error:
        hint = "the token may not see it" if config.token else f"if it is private, set {TOKEN}"
        raise ModelError(
            f"there is no repository {name} on {config.endpoint}: check the spelling; {hint}"
        ) from error
    except errors.NetworkError as error:
        raise ModelError(
            f"{name}: {config.endpoint} cannot be reached: check the network, or name another site "
            "with MODELSCOPE_ENDPOINT"
        ) from error
    except errors.APIError as error:
        if error.status_code in (401, 403):
            raise ModelError(
                f"{name}: {config.endpoint} gives no access: set {TOKEN} to a token of an account "
                f"that may read it{' (the one that was sent is not)' if config.token else ''}"
            ) from error
        raise ModelError(
            f"{name}: {config.endpoint} answered with an error, try again later: {_line(error)}"
        ) from error
    except (errors.HubError, OSError) as error:
        raise ModelError(
            f"{name}: the download failed: {_line(error)}; {_advice(error, setup, config)}"
        ) from error


def _line(error: BaseException) -> str:
    """Return the first line of a message. The others are the request and the answer."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _advice(error: BaseException, setup: ModelSourceSetup, config: HubConfig) -> str:
    number = getattr(error, "errno", None)
    cache = _cache_dir(setup, config)
    move = "move the cache with --download-dir, MODELSCOPE_CACHE or PEGBOARD_CACHE"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: free some space below {cache}, or {move}"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"the cache {cache} cannot be written: {move}"
    return "run again to resume it"
