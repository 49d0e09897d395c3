"""`pegboard plugins compat PATH`: which names of the interfaces a plugin uses, and whether the
installed core still has them.

The source is parsed. Nothing of the plugin is imported or run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pegboard.errors import UsageError
from pegboard.interfaces import KINDS
from pegboard.interfaces.command import CommandSetup
from pegboard_testing.authoring.snapshot import snapshot
from pegboard_testing.contract_source import PUBLIC, imports

PREFIX = "pegboard.interfaces"
NAME = re.compile(r"(?:class |async def |def )?(\w+)")


@dataclass(frozen=True, slots=True)
class Use:
    """One name that a file imports. reason: what is missing, or how the signature was before."""

    symbol: str
    place: str
    stability: Literal["stable", "provisional", "private"]
    status: Literal["present", "missing", "changed"]
    reason: str = ""


class Compat:
    """The command `plugins compat`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard plugins compat",
            description="List the names of Pegboard's interfaces that a plugin's source uses, "
            "how stable each is, and whether "
            "this Pegboard has it. Nothing of the plugin is run. The exit status is 1 if a name "
            "is missing, changed or private.",
        )
        self._parser.add_argument(
            "path", type=Path, metavar="PATH", help="a Python file, or a folder with some"
        )
        self._parser.add_argument(
            "--before",
            type=Path,
            metavar="FILE",
            help=(
                "pegboard/interfaces/snapshot.txt of the older Pegboard: its signatures are "
                "compared with those of this one"
            ),
        )
        self._parser.add_argument(
            "--json", action="store_true", dest="as_json", help="machine-readable output"
        )

    def run(self, words: Sequence[str]) -> int:
        arguments = self._parser.parse(words)
        if arguments.before is not None and not arguments.before.is_file():
            raise UsageError(f"--before {arguments.before}: there is no such file")
        before = (
            symbols(arguments.before.read_text("utf-8")) if arguments.before is not None else {}
        )
        every = list(uses(arguments.path, symbols(snapshot()), before))
        if arguments.as_json:
            print(json.dumps([asdict(use) for use in every], indent=2, ensure_ascii=False))
        else:
            for use in every:
                print(
                    f"{use.status:<8} {use.stability:<12} {use.symbol}  "
                    f"{use.place}{f': {use.reason}' if use.reason else ''}"
                )
        return (
            1 if any(use.status != "present" or use.stability == "private" for use in every) else 0
        )


def symbols(text: str) -> dict[str, str]:
    """Return the names in a snapshot of the interfaces, as "module.name", each with its signature:
    the lines about it."""
    lines: dict[str, str] = {}
    module = name = ""
    for line in text.splitlines():
        if line.startswith("# "):
            module = line[2:]
        elif match := NAME.match(line):
            name = match[1] if module == "__init__" else f"{module}.{match[1]}"
            lines[name] = line
        elif line.strip():
            lines[name] += "\n" + line
    return lines


def uses(path: Path, now: Mapping[str, str], before: Mapping[str, str]) -> Iterator[Use]:
    """Yield every name that the files import from Pegboard's interfaces, and every private module
    of Pegboard that they import. Raises UsageError if there is no source at the path, or a file
    cannot be parsed."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    if not files:
        raise UsageError(
            f"{path}: expected a Python file or a folder with Python files, and found none"
        )
    modules = {symbol.partition(".")[0] for symbol in now if "." in symbol}
    for file in files:
        try:
            names = list(imports(file))
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            raise UsageError(
                f"{file} is not Python that this interpreter can parse: {error}"
            ) from None
        for line, module, name in names:
            words = module.split(".")
            if words[0] == "pegboard" and len(words) > 1 and words[1] not in PUBLIC:
                reason = f"plugins may import pegboard.{{{', '.join(sorted(PUBLIC))}}}"
                yield Use(
                    f"{module}{f'.{name}' if name else ''}",
                    f"{file}:{line}",
                    "private",
                    "present",
                    reason,
                )
            elif words[:2] == PREFIX.split("."):
                yield _use(
                    ".".join(filter(None, [*words[2:], name])),
                    f"{file}:{line}",
                    modules,
                    now,
                    before,
                )


def _use(
    symbol: str, place: str, modules: set[str], now: Mapping[str, str], before: Mapping[str, str]
) -> Use:
    stability = _stability(symbol.partition(".")[0])
    if symbol in now and symbol in before and before[symbol] != now[symbol]:
        lines = [
            line.strip()
            for line in before[symbol].splitlines()
            if line not in now[symbol].splitlines()
        ]
        reason = (
            f"before: {'; '.join(lines)}"
            if lines
            else "it has more members, or they are in another order"
        )
        return Use(symbol, place, stability, "changed", reason)
    if not symbol or symbol in now or symbol in modules:
        return Use(symbol or PREFIX, place, stability, "present")
    return Use(symbol, place, stability, "missing", f"this Pegboard has no {PREFIX}.{symbol}")


def _stability(module: str) -> Literal["stable", "provisional"]:
    kinds = [kind for kind in KINDS.values() if kind.spec.partition(":")[0] == f"{PREFIX}.{module}"]
    return "provisional" if any(kind.provisional for kind in kinds) else "stable"
