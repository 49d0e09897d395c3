"""Parses the model reference that the user typed: a path, "scheme:name", or "org/name".

This module knows no scheme by name. The specs of the installed model sources say which schemes
exist, which one takes paths and which one takes org/name.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from pegboard.errors import ModelError, PluginError, PluginNotFound
from pegboard.interfaces.model_source import ModelReference
from pegboard.plugins.defaults import provider
from pegboard.plugins.names import missing_providers, not_found, to_install
from pegboard.plugins.registry import Registry

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# at least two letters, because "C:\models" is a path
_SCHEME = re.compile(r"([A-Za-z][\w+-]+):(.*)", re.DOTALL)
# a file or "Q4_K_M"
_FILE_AFTER = re.compile(
    r"(?P<name>.+):(?P<file>[^:\\]*[^:\\/.]\.[A-Za-z]\w*|[A-Za-z]\w*)", re.DOTALL
)
_PATH_STARTS = ("./", "../", "/", "~", ".\\", "..\\")


def parse_reference(
    text: str, registry: Registry, *, revision: str | None = None
) -> ModelReference:
    """Call `split_reference` with the schemes of the installed model sources. Broken plugins are
    left out. Raises ModelError as `split_reference` does. If a source is missing, raises
    PluginNotFound, which says what to install."""
    flags: dict[str, frozenset[str]] = {}
    for entry in registry.entries("model_source"):
        try:
            flags[entry.name] = registry.spec(entry).flags
        except PluginError:  # choosing it reports the error; its scheme is still known
            flags[entry.name] = frozenset()
    if not flags:
        raise PluginNotFound(to_install("model_source"))
    scheme = text.strip().partition(":")[0]
    if (
        scheme not in flags
        and provider("model_source", scheme)
        and scheme != text.strip()
        and not _exists(text)
    ):
        raise not_found("model_source", scheme, flags)
    try:
        return split_reference(text, revision, flags, _weight_endings(registry))
    except ModelError as error:
        advice = missing_providers("model_source", flags)
        if advice and not {"directory", "default"} <= frozenset().union(*flags.values()):
            raise PluginNotFound(f"{error}; {advice}") from None
        raise


def split_reference(
    text: str, revision: str | None, flags: Mapping[str, frozenset[str]], endings: tuple[str, ...]
) -> ModelReference:
    """Return the reference that `text` stands for. flags: the flags of the model sources, by
    scheme. The first of these forms that fits is taken:

    1. a path that exists, or that looks like one (it starts with ./ ../ / ~ or has one of
      `endings`, those of weight files);
    2. scheme:name[:file] with an installed scheme;
    3. org/name[:file].

    Raises ModelError, which shows these forms and the nearest scheme, or says that no source for
    the form is installed.
    """
    for_paths = next((name for name in sorted(flags) if "directory" in flags[name]), None)
    for_names = next((name for name in sorted(flags) if "default" in flags[name]), None)
    text = text.strip()
    match = _SCHEME.fullmatch(text)
    scheme, rest = (match[1], match[2]) if match else (None, text)
    if _exists(text) or (_looks_like_path(text, endings) and scheme not in flags):
        return _path(text, revision, for_paths)
    if scheme is not None and scheme in flags and rest:
        return _with_file(scheme, rest, revision)
    parsed = _with_file(for_names or "", text, revision)
    if _is_hub_file(parsed) or (scheme is None and HUB_NAME.fullmatch(parsed.name)):
        if for_names is None:
            raise ModelError(
                f"{text!r}: no installed model source takes names of the form org/name; "
                f"{_forms(flags)}"
            )
        return parsed
    head, tail = _split_path_file(text)
    if tail and _exists(head):
        return _path(head, revision, for_paths, file=tail)
    raise ModelError(
        f"{text!r} is not a model reference{_hint(scheme, rest, flags)}; {_forms(flags)}"
    )


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        # the name is too long, has an unknown home or contains NUL
        return False


def weight_patterns(registry: Registry) -> tuple[str, ...]:
    """Return the file name patterns that the installed weight loaders read."""
    patterns: set[str] = set()
    for entry in registry.entries("weight_loader"):
        with contextlib.suppress(PluginError):  # choosing a broken loader reports the error
            patterns |= set(getattr(registry.spec(entry), "file_patterns", ()))
    return tuple(sorted(patterns))


def _weight_endings(registry: Registry) -> tuple[str, ...]:
    return tuple(
        sorted({Path(pattern).suffix.lower() for pattern in weight_patterns(registry)} - {""})
    )


def _looks_like_path(text: str, endings: tuple[str, ...]) -> bool:
    if text.startswith(_PATH_STARTS) or text in {".", ".."}:
        return True
    return text.lower().endswith(endings) and not _is_hub_file(_with_file("", text, None))


def _is_hub_file(reference: ModelReference) -> bool:
    """True if the reference is org/name:file. The colon distinguishes it from a path."""
    return reference.file is not None and HUB_NAME.fullmatch(reference.name) is not None


def _split_path_file(text: str) -> tuple[str, str | None]:
    match = _FILE_AFTER.fullmatch(text)
    return (match["name"], match["file"]) if match else (text, None)


def _path(
    text: str, revision: str | None, scheme: str | None, file: str | None = None
) -> ModelReference:
    if scheme is None:
        raise ModelError(
            f"{text!r} is a path, but no installed model source takes paths; `pegboard plugins "
            "list` shows what is installed"
        )
    head, tail = _split_path_file(text)
    if file is None and tail and not _exists(text) and _exists(head):
        text = head
        file = tail
    return ModelReference(scheme, text, revision, file)


def _with_file(scheme: str, rest: str, revision: str | None) -> ModelReference:
    name, file = _split_path_file(rest)
    return ModelReference(scheme, name, revision, file)


def _hint(scheme: str | None, rest: str, schemes: Collection[str]) -> str:
    if scheme is not None and scheme not in schemes:
        close = difflib.get_close_matches(scheme.lower(), schemes, n=1)
        meant = f", did you mean {close[0]}:{rest}?" if close else ""
        return f": no installed model source is called {scheme!r}{meant}"
    if scheme is None and "/" not in rest:
        close = difflib.get_close_matches(rest.lower(), schemes, n=1, cutoff=0.8)
        return (
            f": {close[0]} is a scheme and needs a name after it"
            if close
            else ": there is no such file or directory here"
        )
    return ""


def _forms(schemes: Collection[str]) -> str:
    known = ", ".join(f"{scheme}:" for scheme in sorted(schemes)) or "none installed"
    return (
        "expected a directory (./model), a file (./folder/file), org/name with an optional :file "
        f"after it, or scheme:name with one of the schemes {known}"
    )
