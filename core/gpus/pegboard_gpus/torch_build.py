"""What the installed torch was built for. torch is not imported: its own file says so."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

LINE = re.compile(r"(cuda|hip)\b[^=]*=\s*(?:None|'([^']*)'|\"([^\"]*)\")\s*$")


def torch_versions() -> dict[str, str | None] | None:
    """Return the versions of "cuda" and "hip" that torch was built for, or None without torch. A
    version is None if torch was built without the library. A library that the file does not name
    is missing."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0], "version.py")
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    matches = [match for line in lines if (match := LINE.match(line))]
    return {match[1]: match[2] or match[3] for match in matches}


def torch_reason(library: str, name: str) -> str | None:
    """Return why the installed torch cannot use a GPU, or None. library: "cuda" or "hip". name: how
    messages call it."""
    versions = torch_versions()
    if versions is None:
        return f"torch is not installed: install a torch for {name}"
    if library in versions and versions[library] is None:
        return (
            f"the installed torch was built without {name}: install a torch for {name}, or choose "
            "--device cpu"
        )
    return None
