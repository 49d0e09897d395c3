"""`pegboard plugins new KIND NAME`: writes the package of a new plugin, which works and passes its
tests at once.

A template is one text file per kind in `templates/`. It begins with TOML: `summary`, `dependencies`
(beside pegboard), `use` (the command that uses the plugin), and where it differs `entry` (the entry
point's name) and `installed` (what installing it changes). Then come the files, each after a line
`=== path`. `common.txt` has the files of all kinds. `$name`, `$module`, `$Class` and the others of
`words_of` are replaced in paths and texts; `$$` is a dollar.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from pegboard.errors import UsageError
from pegboard.interfaces import KINDS
from pegboard.interfaces.command import CommandSetup
from pegboard.plugins.names import check_kind

NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
ARCHITECTURE = re.compile(r"([A-Z][A-Za-z0-9]*)ForCausalLM")
FILE = re.compile(r"^=== (.+)\n", re.MULTILINE)
TEMPLATES = files("pegboard_testing.authoring").joinpath("templates")


class New:
    """The command `plugins new`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard plugins new",
            description=(
                "Write the package of a new plugin: metadata, spec, a working implementation, and "
                "tests."
            ),
            epilog=f"Kinds: {', '.join(kinds())}.",
        )
        self._parser.add_argument(
            "kind", metavar="KIND", help="what the plugin is, such as tool_parser"
        )
        self._parser.add_argument("name", metavar="NAME", help="the name that users will type")
        self._parser.add_argument(
            "--directory",
            type=Path,
            default=Path(),
            help="where the package's folder is made (default: here)",
        )

    def run(self, words: Sequence[str]) -> int:
        arguments = self._parser.parse(words)
        folder = write_package(arguments.kind, arguments.name, arguments.directory)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            print(path)
        # a plain name would be asked of an index
        place = shlex.quote(str(folder) if folder.is_absolute() else f"./{folder}")
        print(f"\nInstall it:  pip install {place}\nTest it:     python -m pytest {place}")
        return 0


@cache
def kinds() -> tuple[str, ...]:
    """Return the kinds, which all have a template, sorted."""
    names = (path.name.removesuffix(".txt") for path in TEMPLATES.iterdir())
    return tuple(sorted(name for name in names if name in KINDS))


def write_package(kind: str, name: str, directory: Path) -> Path:
    """Make `directory`/<package> with the files of a new plugin, and return it. Raises
    PegboardError if the kind is unknown, if the name cannot be a module's name, or if the folder is
    already there."""
    check_kind(kind)
    about, files = read_template(kind)
    if kind == "model" and (architecture := ARCHITECTURE.fullmatch(name)):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", architecture[1]).lower()
        about = {"Class": architecture[1], **about}
    if not NAME.fullmatch(name):
        form = "lower-case letters, digits, - and _, beginning with a letter"
        raise UsageError(
            f"the name is {name!r}, expected "
            f"{form}{', or NameForCausalLM' if kind == 'model' else ''}"
        )
    words = words_of(kind, name, about)
    folder = directory / words["package"]
    if folder.exists():
        raise UsageError(
            f"{folder} is already there; remove it, or choose another name or --directory"
        )
    for path, text in {**read_template("common")[1], **files}.items():
        file = folder / Template(path).substitute(words)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(text).substitute(words), "utf-8")
    return folder


def read_template(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a template says about itself, and its files: path → text."""
    about, *parts = FILE.split(TEMPLATES.joinpath(f"{name}.txt").read_text("utf-8"))
    return tomllib.loads(about), {
        path: text.lstrip("\n") for path, text in zip(parts[::2], parts[1::2], strict=True)
    }


def words_of(kind: str, name: str, about: Mapping[str, Any]) -> dict[str, str]:
    """Return what the words of the templates stand for."""
    plain = name.replace("-", "_")
    words = {
        "kind": kind,
        "group": KINDS[kind].group,
        "interface": KINDS[kind].spec.rpartition(":")[0],
        "name": name,
        "installed": about.get("installed", "Installing it changes nothing until it is chosen."),
        "flag": name.replace("_", "-"),
        "module": f"pegboard_{kind}_{plain}",
        "package": f"pegboard-{kind}-{name}".replace("_", "-"),
        "Class": about.get("Class", "".join(part.capitalize() for part in plain.split("_"))),
        "CONSTANT": plain.upper(),
        "plain": plain,
        "summary": about["summary"],
        "dependencies": "".join(f'    "{needed}",\n' for needed in about["dependencies"]),
    }
    words["entry"] = Template(about.get("entry", "$name")).substitute(words)
    return {**words, "use": Template(about["use"]).substitute(words)}
