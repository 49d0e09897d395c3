"""For model sources: which files of a repository are fetched, and which of them is the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from pegboard.errors import ModelError

SETTINGS = ("*.json", "*.jinja", "*.model", "*.model.v*", "*.tiktoken", "merges.txt", "vocab.txt")
WEIGHTS = ("*.safetensors",)
PICKLED = (("*.bin",), ("*.pt", "*.pth"))
"""Groups of files of torch.save. Only the first group that a repository has is fetched, and only if
the repository has no safetensors files."""
NO_WEIGHTS = ("optimizer.*", "scaler.*", "scheduler.*", "training_args.*", "rng_state*")
"""Files that trainers write next to the weights."""

_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)


def is_unsafe(name: str) -> bool:
    """Tell whether a file name may point outside of its folder."""
    parts = name.split("/")
    return bool({"", ".", ".."} & set(parts)) or any(mark in name for mark in "\\:\0")


def chosen_names(
    names: Iterable[str],
    file: str | None,
    patterns: tuple[str, ...],
    readable: tuple[str, ...],
) -> list[str]:
    """Return the names of the files to fetch. file: see `ModelReference`. patterns: those that the
    caller asked for; if there are any, only matching files are taken, and no pickled weights.
    readable: the patterns that the installed weight loaders read."""
    visible = [name for name in sorted(names) if not any(p[:1] == "." for p in name.split("/"))]
    if patterns:
        pickled = tuple(pattern for group in PICKLED for pattern in group)
        return [name for name in _matching(visible, patterns) if not _fits(name, pickled)]
    if file is None:
        return sorted({*_matching(visible, SETTINGS), *_weights(visible, readable)})
    models = _ggufs(visible, file)
    if file.lower().endswith(".gguf") or "." not in file:
        return models
    return sorted({*_matching(visible, SETTINGS), *(name for name in visible if name == file)})


def model_name(names: Iterable[str], file: str | None, repository: str) -> str | None:
    """Return the name of the GGUF file, or of the first part of a split one. None = the model is
    the whole folder. Raises ModelError if the model is not there, or if there are several."""
    names = sorted(names)
    if file is None:
        if any(name == "config.json" or fnmatchcase(name, "*.safetensors") for name in names):
            return None
        raise ModelError(
            f"{repository}: found neither config.json nor *.safetensors in the repository. If it "
            f"contains GGUF files, name one as {repository}:FILE.gguf or {repository}:Q4_K_M"
        )
    if not file.lower().endswith(".gguf") and "." in file:
        if file in names:
            return None
        raise ModelError(f"{repository}: the repository contains no file {file!r}")
    models = [name for name in _ggufs(names, file) if _is_first(name)]
    if len(models) == 1:
        return models[0]
    reason = (
        f"contains several models of the type {file}: {', '.join(models)}"
        if models
        else f"contains no file {file!r}"
        if "." in file
        else f"contains no {file} GGUF file"
    )
    raise ModelError(f"{repository}: the repository {reason}; name one as {repository}:FILE.gguf")


def _weights(names: list[str], readable: tuple[str, ...]) -> list[str]:
    """Return the weight files: safetensors files, else files of torch.save if a loader reads
    them."""
    weights = _matching(names, WEIGHTS)
    if any("/" not in name for name in weights):
        return weights
    return pickled_weights(names, readable) or weights


def pickled_weights(names: Iterable[str], readable: Iterable[str]) -> list[str]:
    """Return the files of torch.save that hold weights, of the first group that is there. readable:
    the patterns that the installed weight loaders read."""
    candidates = [name for name in names if "/" not in name and not _fits(name, NO_WEIGHTS)]
    for group in PICKLED:
        if pickled := _matching(candidates, tuple(set(group) & set(readable))):
            return pickled
    return []


def _ggufs(names: list[str], file: str) -> list[str]:
    """Return the GGUF files that `file` stands for: all parts of that file, or the files whose
    names end with that type."""
    if "." in file:
        split = _SPLIT.search(file)
        if split is None:
            return [name for name in names if name == file]
        whole = re.compile(re.escape(file[: split.start()]) + rf"-\d{{5}}-of-{split[1]}\.gguf")
        return [name for name in names if whole.fullmatch(name)]
    of_type = re.compile(rf".*[-.]{re.escape(file)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    return [
        name
        for name in names
        if of_type.fullmatch(name) and not name.rpartition("/")[2].startswith("mmproj")
    ]


def _is_first(name: str) -> bool:
    part = _SPLIT.search(name)
    return part is None or f"-00001-of-{part[1]}" in name


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _matching(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if _fits(name, patterns)]
