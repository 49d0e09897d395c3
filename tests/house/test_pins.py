"""A fresh environment installs the tested versions: every distribution that the requirements reach
has a pin."""

from __future__ import annotations

from importlib.metadata import distribution

from members import ROOT, members
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def lines(name: str) -> list[str]:
    text = (ROOT / name).read_text("utf-8")
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def needs(requirement: Requirement) -> list[Requirement]:
    """Returns the requirements of a distribution on this platform, with the requested extras."""
    found = [Requirement(text) for text in distribution(requirement.name).requires or ()]
    extras = {"", *requirement.extras}
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def everything() -> set[str]:
    open_ones = [Requirement(line) for line in lines("requirements-dev.txt")]
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_ones:
        one = open_ones.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key not in seen:
            seen.add(key)
            found.add(key[0])
            open_ones += needs(one)
    return found


def pins() -> dict[str, Version]:
    pairs = (line.split("==") for line in lines("constraints.txt"))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_everything_that_is_installed_is_pinned() -> None:
    assert not sorted(everything() - set(pins()))


def test_the_tests_run_with_what_is_pinned() -> None:
    wrong = {name: distribution(name).version for name in everything() & set(pins())}
    assert {
        name: found for name, found in wrong.items() if Version(found).public != pins()[name].public
    } == {}


def test_what_members_need_is_among_the_requirements() -> None:
    """`make setup` installs the distributions of this repository without their dependencies."""
    known = everything()
    for member in members():
        wanted = map(Requirement, member.metadata.get("dependencies", []))
        missing = {
            canonicalize_name(one.name) for one in wanted if not one.name.startswith("pegboard")
        } - known
        assert not missing, (
            f"{member.name} needs {sorted(missing)}: add them to requirements-dev.txt"
        )
