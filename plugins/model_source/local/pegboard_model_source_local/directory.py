"""The model source `local`: a directory or a file that is already on disk. Copies and writes
nothing."""

from __future__ import annotations

import difflib
from fnmatch import fnmatch
from pathlib import Path

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSourceSetup,
    Progress,
)
from pegboard_model_source_local.layout import is_pattern_met, pick_file, pick_gguf

_EXPECTED = "config.json with *.safetensors, or a *.gguf file"


class DirectorySource:
    """Accepts a directory in Hugging Face layout, a directory with one GGUF model, or one file."""

    def __init__(self, options: None, setup: ModelSourceSetup) -> None:
        self._patterns = setup.weight_patterns

    def fetch(
        self, reference: ModelReference, wanted: FileFilter, progress: Progress
    ) -> LocalFiles:
        if reference.revision is not None:
            raise ModelError(
                f"{reference.name}: a path on disk has no revisions; leave out revision "
                f"{reference.revision!r}"
            )
        path = _absolute(reference.name)
        if path.is_dir():
            return LocalFiles(self._model_in(path, reference, wanted))
        if not path.exists():
            raise ModelError(
                f"no model at {path}: there is no such file or directory{_neighbors(path)}"
            )
        if reference.file is not None and reference.file != path.name:
            raise ModelError(
                f"{path} is a file, so it contains no file {reference.file!r}; give its directory "
                "or only the file"
            )
        return LocalFiles(path)

    def _model_in(self, directory: Path, reference: ModelReference, wanted: FileFilter) -> Path:
        try:
            files = [path for path in sorted(directory.iterdir()) if path.is_file()]
        except OSError as error:
            raise ModelError(f"cannot read the directory {directory}: {error.strerror}") from error
        if reference.file is not None:
            inside = directory / reference.file
            return inside if inside.is_file() else pick_file(files, reference.file, str(directory))
        names = [path.name for path in files]
        if not is_pattern_met(names, wanted.patterns):
            expected = " or ".join(wanted.patterns)
            raise ModelError(
                f"{directory}: contains no file matching {expected}; it contains: {_listing(names)}"
            )
        if "config.json" in names:
            return directory
        if gguf := pick_gguf(files, str(directory)):
            return gguf
        if "params.json" in names:  # in Mistral's own format
            return directory
        if any(name.endswith(".safetensors") for name in names):
            raise ModelError(
                f"{directory}: has weights but no config.json; copy that file from the source of "
                "the weights"
            )
        # in a format of its own
        if any(fnmatch(name, pattern) for name in names for pattern in self._patterns):
            return directory
        others = sorted({*self._patterns} - {"*.safetensors", "*.gguf"})
        expected = f"{_EXPECTED}{', or ' if others else ''}{', '.join(others)}"
        raise ModelError(
            f"{directory}: no model found, looked for {expected}; it contains: {_listing(names)}"
        )


def _absolute(name: str) -> Path:
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError as error:  # "~name" with an unknown user
        raise ModelError(
            f"{name}: the home directory in this path is not known ({error})"
        ) from error


def _listing(names: list[str], limit: int = 12) -> str:
    shown = ", ".join(names[:limit]) or "no files"
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def _neighbors(path: Path) -> str:
    """Suggests what the user may have meant: names similar to the missing one, in the deepest
    folder that exists."""
    while not path.parent.is_dir():
        path = path.parent
    try:
        names = [other.name for other in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3)
    return (
        f"; in {path.parent} there is {', '.join(close)}"
        if close
        else f"; {path.parent} exists, but {path.name} does not"
    )
