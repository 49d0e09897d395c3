"""`pegboard plugins test`, of a plugin or a package's folder: the generic checks, the plugin's own
tests with the contract of its kind, and a request."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pegboard import __version__
from pegboard.config.sources import plugin_config
from pegboard.errors import PluginError, UsageError
from pegboard.installed import Entry, normalized
from pegboard.interfaces.command import CommandSetup
from pegboard.interfaces.spec import Spec
from pegboard.plugins.discovery import UNINSTALLED
from pegboard.plugins.importing import import_part, import_spec
from pegboard.plugins.registry import Registry
from pegboard_doctor import programs
from pegboard_testing import contract_generic, contract_source
from pegboard_testing.authoring.one_request import SETTINGS, serve_one

CONTRACTS = {
    "tool_parser": ("contract_output_parser",),
    "reasoning_parser": ("contract_output_parser",),
    "kernel": ("contract_kernel", "contract_float_weight", "contract_sample_tokens"),
    "attention": ("contract_attention", "contract_latent", "contract_encoder"),
    "draft": ("contract_draft", "contract_draft_model"),
}
"""The modules with the contract classes of a kind, where it is not contract_<kind>."""
OPTIONAL = frozenset({"kernel"})
"""Kinds of which only some plugins have a contract class: most ops are compared with their
reference."""
LIMIT_S = 300.0
"""Seconds that each check of a plugin may take, and all its tests."""
MAX_REASON = 2000
"""Characters of a failure that are kept: the end of pytest's output."""


@dataclass(frozen=True, slots=True)
class Result:
    """status: "none" = there is nothing to check. reason: why it failed or was not checked, or how
    much was."""

    check: str
    status: Literal["passed", "failed", "none"]
    reason: str = ""


class Conformance:
    """The command `plugins test`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard plugins test",
            description="Test an installed plugin, or all of a package's folder: generic checks, "
            "its own tests with the contract of its kind, and a request "
            "that a tiny model answers with it. The exit status is 1 if anything failed.",
        )
        self._parser.add_argument(
            "plugin",
            metavar="KIND:NAME|FOLDER",
            help='"kind:name", "kind:distribution:name", or the folder of an installed package',
        )
        self._parser.add_argument(
            "--tests",
            type=Path,
            metavar="FOLDER",
            help="the plugin's tests (default: tests/ in the folder, or next to the package)",
        )
        self._parser.add_argument(
            "--options",
            default="{}",
            metavar="JSON",
            help="the plugin's options for the request, as a JSON object",
        )
        self._parser.add_argument(
            "--limit",
            type=float,
            default=LIMIT_S,
            metavar="SECONDS",
            help=f"of each check, and of all tests (default {LIMIT_S:g})",
        )
        self._parser.add_argument(
            "--json",
            action="store_true",
            dest="as_json",
            help="machine-readable output: conformance.json",
        )

    def run(self, words: Sequence[str]) -> int:
        arguments: Namespace = self._parser.parse(words)
        if arguments.tests is not None and not arguments.tests.is_dir():
            raise UsageError(f"--tests {arguments.tests}: there is no such folder")
        registry = Registry.discover(plugin_config())
        folder = Path(arguments.plugin)
        is_folder = (folder / "pyproject.toml").is_file()
        if is_folder:
            entries = entries_of(folder, registry)
            if arguments.tests is None and (folder / "tests").is_dir():
                arguments.tests = folder / "tests"
        else:
            entries = [_entry(arguments.plugin, registry)]
        options = _options(arguments.options)
        reports = [self._report(entry, options, arguments) for entry in entries]
        if arguments.as_json:
            shown = reports if is_folder else reports[0]
            print(json.dumps(shown, indent=2, ensure_ascii=False))
        return 0 if all(each["conforms"] for each in reports) else 1

    def _report(
        self, entry: Entry, options: dict[str, Any], arguments: Namespace
    ) -> dict[str, Any]:
        """Examine a plugin. Return the content of conformance.json, or print it as text."""
        results = []
        for result in examine(entry, arguments.tests, options, arguments.limit):
            results.append(result)
            if not arguments.as_json:
                reason = f": {result.reason}" if result.reason else ""
                print(f"{result.status:<7} {result.check}{reason}", flush=True)
        conforms = all(result.status != "failed" for result in results)
        if not arguments.as_json:
            print(f"{entry.id} {'conforms' if conforms else 'does not conform'}")
        return report(entry, results, conforms)


def _entry(plugin: str, registry: Registry) -> Entry:
    kind, colon, name = plugin.partition(":")
    if not (colon and name):
        raise UsageError(
            f"{plugin!r}: expected KIND:NAME, as in 'tool_parser:hermes', or a folder with a "
            "pyproject.toml"
        )
    entry = registry.find(kind, name)
    if entry.version == UNINSTALLED:
        raise UsageError(
            f"{entry.id} is a file, and this tests packages: pegboard plugins new {kind} NAME "
            "makes one"
        )
    return entry


def entries_of(folder: Path, registry: Registry) -> list[Entry]:
    """Return the plugins of a package's folder, as they are installed. Raises UsageError if one is
    not."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        groups = project.get("entry-points", {})
        wanted = {(group, name) for group, names in groups.items() for name in names}
        distribution = normalized(project["name"])
    except (KeyError, AttributeError, TypeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{folder}/pyproject.toml cannot be read: {error!r}") from error
    wanted = {(group, name) for group, name in wanted if group.startswith("pegboard.")}
    entries = [
        entry
        for entry in registry.scan.entries
        if entry.distribution == distribution and (entry.group, entry.name) in wanted
    ]
    if missing := sorted(wanted - {(entry.group, entry.name) for entry in entries}):
        raise UsageError(
            f"{missing[0][1]!r} of {missing[0][0]} is not installed: pip install {folder}"
        )
    if not entries:
        raise UsageError(f"{folder}/pyproject.toml has no entry points of pegboard")
    return entries


def _options(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--options {text!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f'--options {text!r}: expected a JSON object, as in {{"path": "blocks"}}')
    return values


def report(entry: Entry, results: Sequence[Result], conforms: bool) -> dict[str, Any]:
    """Return the content of conformance.json."""
    about = {
        "plugin": f"{entry.kind}:{entry.name}",
        "distribution": entry.distribution,
        "version": entry.version,
    }
    return {
        **about,
        "pegboard": __version__,
        "conforms": conforms,
        "checks": [asdict(result) for result in results],
    }


def examine(
    entry: Entry, tests: Path | None, request_options: dict[str, Any], limit_s: float = LIMIT_S
) -> Iterator[Result]:
    """Yield the result of each check. tests: the folder of the plugin's tests, or None if it is to
    be found. request_options: the plugin's options for the request on a tiny model. limit_s:
    seconds for each check, and for all tests."""
    yield _checked("metadata", partial(contract_generic.check_metadata, entry))
    answer = programs.examined(__name__, [entry], limit_s=limit_s)[entry]
    if isinstance(answer, str):
        yield Result("the plugin's code", "failed", f"{entry.id}: {answer}")
        return
    yield from (Result(**result) for result in answer["results"])
    if answer["has_spec"]:
        yield from _tested(entry, tests or _find_tests(entry), limit_s)
        yield serve(entry, import_spec(entry), request_options)


@dataclass(frozen=True, slots=True)
class Checks:
    """What the program of its own found. has_spec: the spec could be imported, so the checks are
    complete."""

    results: Sequence[Result]
    has_spec: bool = True


def _all_checks(entry: Entry) -> Checks:
    results = [
        _checked(
            "the spec is light and has no side effects",
            partial(contract_generic.check_spec_import, entry),
        )
    ]
    try:
        spec = import_spec(entry)
    except PluginError as error:
        return Checks([*results, Result("the spec", "failed", str(error))], has_spec=False)
    checks: dict[str, Callable[[Entry, Spec], None]] = {
        "the spec is valid": contract_generic.check_spec,
        "parts and their methods": contract_generic.check_parts,
        "signatures": contract_source.check_signatures,
        "options": contract_generic.check_options,
        "probe": contract_generic.check_probe,
    }
    for name, check in checks.items():
        programs.stage(f"the check of {name!r}")
        results.append(_checked(name, partial(check, entry, spec)))
    return Checks([*results, _checked("imports", partial(contract_source.check_imports, entry))])


def _checked(name: str, check: Callable[[], None]) -> Result:
    try:
        check()
    except (AssertionError, PluginError) as error:
        return Result(name, "failed", str(error))
    except Exception as error:  # noqa: BLE001  the plugin's code ran, and may raise anything
        return Result(name, "failed", f"{type(error).__name__}: {error}")
    return Result(name, "passed")


def serve(entry: Entry, spec: Spec, options: dict[str, Any]) -> Result:
    """Send requests to a tiny model that uses the plugin."""
    if entry.kind not in SETTINGS:
        return Result("a request", "none", f"the tiny model does not use the kind {entry.kind}")
    if spec.options is not None:
        fields = import_part(entry, spec.options, "options").model_fields
        missing = [
            name for name, field in fields.items() if field.is_required() and name not in options
        ]
        if missing:
            return Result(
                "a request",
                "none",
                f"options without a default: {', '.join(missing)}; give them with --options",
            )
    return Result("a request", *serve_one(entry.kind, entry.name, options))


def _find_tests(entry: Entry) -> Path | None:
    spec = find_spec(entry.value.partition(".")[0])
    folder = Path(spec.origin).parent.parent / "tests" if spec is not None and spec.origin else None
    return folder if folder is not None and folder.is_dir() else None


def _tested(entry: Entry, tests: Path | None, limit_s: float) -> Iterator[Result]:
    """Run the plugin's tests. Some of them must be of a contract class of the kind, if it has
    one."""
    if tests is None:
        yield Result(
            "tests",
            "none",
            "they are not installed with the package; name their folder with --tests",
        )
        return
    counts, output, status = run_tests(tests, limit_s)
    failed = counts.get("failed", 0)
    passed = counts.get("passed", 0)
    if status or failed or not passed:
        yield Result(
            "tests",
            "failed",
            f"{failed} failed, {passed} passed in {tests}\n{output[-MAX_REASON:]}",
        )
    else:
        yield Result("tests", "passed", f"{passed} passed in {tests}")
    modules = CONTRACTS.get(entry.kind, (f"contract_{entry.kind}",))
    known = [module for module in modules if find_spec(f"pegboard_testing.{module}") is not None]
    number = sum(counts.get(f"pegboard_testing.{module}", 0) for module in known)
    if number:
        yield Result(
            "contract",
            "passed" if not failed else "failed",
            f"{number} tests are of the contract of {entry.kind}",
        )
    elif not known or entry.kind in OPTIONAL:
        yield Result("contract", "none", f"no contract class fits every {entry.kind}")
    else:
        names = " or ".join(f"pegboard_testing.{module}" for module in known)
        yield Result(
            "contract", "failed", f"no test class in {tests} derives from the contract in {names}"
        )


def run_tests(tests: Path, limit_s: float = LIMIT_S) -> tuple[dict[str, int], str, int]:
    """Run pytest on a folder in a new interpreter. Return numbers (passed and failed tests, and
    tests per module of a contract class), pytest's output, and its exit status. If it does not end
    in time or a test ends it, the output ends with the name of the test, and the status is 1."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        log = Path(folder) / "output"
        words = [
            "-m",
            "pytest",
            "-q",
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
            "-p",
            f"{__package__}.count_tests",
        ]
        command = [sys.executable, *words, str(tests.resolve())]
        with log.open("wb") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            with programs.limited(
                command, env={"PEGBOARD_TEST_COUNTS": str(counts)}, cwd=folder, **streams
            ) as program:
                try:
                    status = program.wait(limit_s)
                    ended = "ended the program"
                except subprocess.TimeoutExpired:
                    status = 1
                    ended = f"did not end within {limit_s:g} s (--limit)"
        output = log.read_text("utf-8", "replace")
        if counts.is_file():
            numbers: dict[str, int] = json.loads(counts.read_text("utf-8"))
            return numbers, output, status
        running = counts.with_suffix(".now")
        test = running.read_text("utf-8") if running.is_file() else "the collection of the tests"
    return {}, f"{output}\n{test} {ended}", status or 1


if __name__ == "__main__":
    programs.answer(_all_checks)
