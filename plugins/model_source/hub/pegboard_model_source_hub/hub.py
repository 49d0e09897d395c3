"""The model source `hub`: repositories of the Hugging Face Hub, through the huggingface_hub
library.

Pickled weights (*.bin, *.pt, *.pth) are fetched only if the repository has no safetensors files and
a loader for them is installed: most programs run code of such files.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
from huggingface_hub import constants, errors
from tqdm.auto import tqdm

from pegboard import env
from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSourceSetup,
    Progress,
)
from pegboard_weights.repository_files import NO_WEIGHTS, PICKLED, SETTINGS, WEIGHTS

PART = "?????-of-?????"
"""The end of the name of a part of a split GGUF file."""
UNASKED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")

_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)


class HubSource:
    """Accepts "org/name". Files go to the folder that the user chose (`download_dir`). Without one,
    they go to the user's own Hugging Face cache if one is configured or in use, otherwise below
    `cache_dir/hub`. huggingface_hub resumes broken downloads and moves finished files into
    place."""

    def __init__(self, options: None, setup: ModelSourceSetup) -> None:
        self._setup = setup

    def fetch(
        self, reference: ModelReference, wanted: FileFilter, progress: Progress
    ) -> LocalFiles:
        patterns = wanted.patterns or _patterns(reference.file)
        try:
            with _translated(reference, self._setup):
                root = self._download(reference, patterns, UNASKED, progress)
                if reference.file is None and not wanted.patterns:
                    self._fetch_pickled(root, reference, progress)
        except ModelError as error:
            if env.log_level() == "DEBUG":
                raise
            # the message says it all; the chain of the network's errors has a hundred lines
            raise error from None
        return LocalFiles(_model_in(root, reference))

    def _fetch_pickled(self, root: Path, reference: ModelReference, progress: Progress) -> None:
        """Download files of torch.save that a loader reads, if there are no others."""
        if _has_weights(root, (*WEIGHTS, "*.gguf")):
            return
        for group in PICKLED:
            readable = tuple(one for one in group if one in self._setup.weight_patterns)
            if readable:
                # also if there are some already: the download may have been broken off
                self._download(reference, readable, (*NO_WEIGHTS, "*/*"), progress)
                if _has_weights(root, readable):
                    return

    def _download(
        self,
        reference: ModelReference,
        patterns: tuple[str, ...],
        ignored: tuple[str, ...],
        progress: Progress,
    ) -> Path:
        """Download the files that fit, and return the snapshot's directory."""
        return Path(
            huggingface_hub.snapshot_download(
                reference.name,
                revision=reference.revision,
                cache_dir=_cache_dir(self._setup),
                token=self._setup.token,
                local_files_only=self._setup.offline,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
                tqdm_class=_bars(reference.name, progress),
            )
        )


def _has_weights(root: Path, patterns: tuple[str, ...]) -> bool:
    def fits(name: str, some: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in some)

    names = [path.name for path in root.iterdir()]
    return any(fits(name, patterns) and not fits(name, NO_WEIGHTS) for name in names)


def _patterns(file: str | None) -> tuple[str, ...]:
    """Returns the file patterns to fetch. A named GGUF file contains its configuration and
    tokenizer. For any other file, those are fetched too. `file` may also be the type of a GGUF
    file's weights ("Q4_K_M")."""
    if file is None:
        return SETTINGS + WEIGHTS
    if "." not in file:
        return tuple(
            f"*{before}{name}{part}.gguf"
            for name in dict.fromkeys((file, file.lower(), file.upper()))
            for before in "-."
            for part in ("", f"-{PART}")
        )
    if not file.lower().endswith(".gguf"):
        return (*SETTINGS, file)
    split = _SPLIT.search(file)
    return (file,) if split is None else (f"{file[: split.start()]}-?????-of-{split[1]}.gguf",)


def _cache_dir(setup: ModelSourceSetup) -> Path | None:
    """The cache directory for huggingface_hub: the one that the user chose for Pegboard, in the
    library's own layout. None lets the library use its own cache, if the user moved that cache or
    already keeps models there."""
    if setup.is_chosen:
        return setup.cache_dir
    cache = Path(constants.HF_HUB_CACHE)
    is_moved = cache != Path(constants.default_home).expanduser() / "huggingface" / "hub"
    return None if is_moved or cache.is_dir() else setup.cache_dir / "hub"


def _model_in(root: Path, reference: ModelReference) -> Path:
    """Returns the snapshot's directory, or the named GGUF file in it. Raises ModelError if the
    model is not among the fetched files."""
    if reference.file is not None and "." not in reference.file:
        return _model_of_type(root, reference, reference.file)
    if reference.file is not None:
        path = root / reference.file
        if not path.is_file():
            raise ModelError(
                f"{reference.name}: the repository contains no file {reference.file!r}; see "
                f"{_page(reference)}/tree/main"
            )
        return path if path.suffix.lower() == ".gguf" else root
    if (
        not any(root.glob("*.safetensors"))
        and not any(root.glob("*.gguf"))
        and not (root / "config.json").is_file()
    ):
        raise ModelError(
            f"{reference.name}: found neither config.json nor *.safetensors in the repository. If "
            f"it contains GGUF files, name one as {reference.name}:FILE.gguf or "
            f"{reference.name}:Q4_K_M; see {_page(reference)}/tree/main"
        )
    return root


def _model_of_type(root: Path, reference: ModelReference, wanted: str) -> Path:
    """Returns the GGUF file (the first part of a split one) whose weights have this type. Raises
    ModelError if there is no such file, or several."""
    patterns = _patterns(wanted)
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.gguf")
        if not path.name.startswith("mmproj")
    ]
    matching = [
        name for name in sorted(names) if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    models = [
        name
        for name in matching
        if (part := _SPLIT.search(name)) is None or f"-00001-of-{part[1]}" in name
    ]
    if len(models) == 1:
        return root / models[0]
    message = (
        f"contains several models of the type {wanted}: {', '.join(models)}"
        if models
        else f"contains no {wanted} GGUF file"
    )
    raise ModelError(
        f"{reference.name}: the repository {message}; name one as {reference.name}:FILE.gguf; see "
        f"{_page(reference)}/tree/main"
    )


def _page(reference: ModelReference) -> str:
    return f"{constants.ENDPOINT}/{reference.name}"


def _bars(name: str, progress: Progress) -> type[tqdm]:
    """A progress bar that also reports to `progress`. huggingface_hub makes one for bytes and one
    for files."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own bars accept this
            super().__init__(*args, **kwargs)
            self._counts_bytes = kwargs.get("unit") == "B"

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self._counts_bytes:
                progress(name, int(self.n), int(self.total) if self.total else None)
            return shown

    return Bar


@contextmanager
def _translated(reference: ModelReference, setup: ModelSourceSetup) -> Iterator[None]:
    """Turns errors of huggingface_hub and of the network into ModelError. Subclasses come before
    their base classes."""
    name = reference.name
    revision = reference.revision
    try:
        yield
    except errors.GatedRepoError as error:
        message = "your token has no access" if setup.token else "no token was given"
        raise ModelError(
            f"{name} is gated and {message}: accept its terms at {_page(reference)}, then pass "
            "--hf-token or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        hint = (
            "or the token may not see it"
            if setup.token
            else "or it is private: pass --hf-token or set HF_TOKEN"
        )
        raise ModelError(
            f"there is no directory {name} here and no repository {name} on {constants.ENDPOINT}: "
            f"check the spelling, {hint}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"{name} has no revision {revision!r}; branches and tags are listed at "
            f"{_page(reference)}"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(
            f"{name!r} is not the name of a repository, expected org/name: {error}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        at = f" at revision {revision!r}" if revision else ""
        if setup.offline:
            raise ModelError(
                f"there is no directory {name} here, {name}{at} is not in the cache, and "
                "downloads are off (offline: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set); run "
                "once without it"
            ) from error
        raise ModelError(
            f"there is no directory {name} here, {name}{at} is not in the cache, and "
            f"{constants.ENDPOINT} cannot be reached: check the path or the network"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ModelError(
            f"{name}: {constants.ENDPOINT} answered with an error, try again later: {error}"
        ) from error
    except (OSError, httpx.HTTPError) as error:  # errors of the disk and of the network
        raise ModelError(
            f"{name}: the download failed: {error}; {_advice(error, setup)}"
        ) from error


def _advice(error: Exception, setup: ModelSourceSetup) -> str:
    """Says what to do about an error of the disk or of the network."""
    number = getattr(error, "errno", None)
    cache = _cache_dir(setup) or constants.HF_HUB_CACHE
    if number in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: free some space below {cache}, or move the cache with "
            "HF_HUB_CACHE or PEGBOARD_CACHE"
        )
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"the cache {cache} cannot be written: move it with HF_HUB_CACHE or PEGBOARD_CACHE"
    return "run again to resume it"
