"""Virtual environments whose interpreter also sees the packages of another folder. pip finds those
installed, so it fetches none of them."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path


class LinkedEnvironment:
    """A new virtual environment without pip. packages: the folder of the other packages. bin: of
    its programs. site: its own packages, which come first."""

    def __init__(self, folder: Path, packages: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        self.site = show_packages(folder, packages)

    def pip(self, *words: str | Path) -> list[str]:
        """Returns the command with which this interpreter's pip works on the environment."""
        pip = ("-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
        python = str(self.bin / "python")
        return [sys.executable, *pip, "--python", python, *map(str, words)]


def show_packages(environment: Path, packages: Path) -> Path:
    """Let a virtual environment see the packages of a folder, also those that are installed there
    as editables. Returns the folder of its own packages."""
    places = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=places))
    (site / "others.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    return site
