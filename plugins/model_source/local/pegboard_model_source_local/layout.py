"""Finds the model in a folder. Looks only at file names, never at file contents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from pegboard.errors import ModelError

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_TYPE = r"(.*[-.])?{}(-\d{{5}}-of-\d{{5}})?\.gguf"
"""Names of files whose weights have a type: model-Q4_K_M.gguf, model.q4_k_m.gguf."""


def is_pattern_met(names: Iterable[str], patterns: Sequence[str]) -> bool:
    """True if any of `names` matches any of `patterns`, or if there are no patterns."""
    return not patterns or any(
        fnmatch(Path(name).name, pattern) for name in names for pattern in patterns
    )


def pick_file(files: Sequence[Path], wanted: str, where: str) -> Path:
    """Returns the one file whose path ends with `wanted` ("model.gguf" or "folder/model.gguf"), or
    the GGUF model of the type `wanted` ("Q4_K_M"). Raises ModelError, with a list of the files,
    when no path or several paths do."""
    if "." not in wanted:
        of_type = re.compile(_TYPE.format(re.escape(wanted)), re.IGNORECASE)
        model = pick_gguf([path for path in files if of_type.fullmatch(path.name)], where)
        if model is not None:
            return model
    parts = Path(wanted).parts
    matching = [path for path in files if path.parts[-len(parts) :] == parts]
    if len(matching) == 1:
        return matching[0]
    problem = f"several files are called {wanted!r}" if matching else f"there is no file {wanted!r}"
    names = ", ".join(sorted(path.name for path in files)) or "nothing"
    raise ModelError(f"{where}: {problem}; it holds: {names}")


def is_projector(path: Path) -> bool:
    """True for the part of a multimodal model that reads images, which comes in a file of its
    own."""
    return path.name.startswith("mmproj")


def pick_gguf(files: Sequence[Path], where: str) -> Path | None:
    """Returns the one GGUF model among `files` (the first part of a split one), or None if there is
    none. Files of vision towers are no models. Raises ModelError when there are several models,
    because then the user must name one."""
    models = []
    for path in sorted(files):
        if path.suffix.lower() == ".gguf" and not is_projector(path):
            part = _PART.search(path.name)
            if part is None or int(part[1]) == 1:
                models.append(path)
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise ModelError(
            f"{where}: contains {len(models)} GGUF models; name one of them as {where}:FILE; they "
            f"are: {names}"
        )
    return models[0] if models else None
