"""Builds a release of the repository: wheels and sdists of all distributions, an index for pip,
checksums and the release's section of the changelog.

python -m pegboard_testing.authoring.release OUTPUT                    what `make release` calls
python -m pegboard_testing.authoring.release OUTPUT --version 0.2.0    with another version
python -m pegboard_testing.authoring.release --set-version 0.2.0       writes it into the sources

Two builds of the same commit have the same bytes if SOURCE_DATE_EPOCH is the same, which `make
release` sets to the time of the commit.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
import shutil
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version
from tqdm import tqdm

from pegboard.errors import ConfigError
from pegboard.installed import normalized
from pegboard.interfaces import KINDS
from pegboard_testing.authoring.catalogue import REPOSITORY, project_files

VERSION_LINE = re.compile(r'^(version|__version__) = "([^"]+)"$', re.M)
UNRELEASED = re.compile(r"^## (\S+), unreleased$", re.M)


@dataclass(frozen=True, slots=True)
class Source:
    """One distribution of the repository. folder: where its pyproject.toml is. module: its import
    package, a folder below that. kinds: those of its plugins, in the order of the list of kinds."""

    folder: Path
    name: str
    version: str
    module: str
    summary: str
    kinds: tuple[str, ...]


def sources(repository: Path) -> list[Source]:
    """Return all distributions of a repository. Raises ConfigError if they have not all the same
    version."""
    every = []
    for path in project_files(repository):
        content = tomllib.loads(path.read_text("utf-8"))
        if "flit" not in content.get("tool", {}):
            continue
        project = content["project"]
        module = content["tool"]["flit"]["module"]["name"]
        groups = project.get("entry-points", ())
        kinds = tuple(kind.name for kind in KINDS.values() if kind.group in groups)
        facts = (project[name] for name in ("name", "version"))
        every.append(Source(path.parent, *facts, module, project["description"], kinds))
    versions = {source.version for source in every}
    if len(versions) != 1:
        raise ConfigError(
            f"a release has one version, and the distributions in {repository} have "
            f"{', '.join(sorted(versions)) or 'none'}"
        )
    return every


def build(repository: Path, output: Path, version: str | None = None) -> list[Path]:
    """Write the release to the folder `output`, which must be empty or absent. version: what to
    build instead of the version in the sources, which stay as they are. Returns the wheels and
    sdists. Raises ConfigError."""
    every = sources(repository)
    version = checked(version or every[0].version)
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty: a release is written to an empty folder")
    output.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for source in tqdm(every, "building", unit="package", disable=not sys.stderr.isatty()):
        files += _build_one(repository, source, output, version)
    write_index(output / "simple", files)
    lines = [f"{_sha256(file)}  {file.name}" for file in sorted(files)]
    (output / "SHA256SUMS").write_text("\n".join(lines) + "\n", "utf-8")
    changes = (repository / "CHANGELOG.md").read_text("utf-8")
    (output / "NOTES.md").write_text(section(changes, every[0].version), "utf-8")
    return files


def checked(version: str) -> str:
    """Return the version in its normal form. Raises ConfigError if it is none (PEP 440)."""
    try:
        return str(Version(version))
    except InvalidVersion:
        raise ConfigError(
            f"version {version!r}: expected a version such as 0.2.0 or 0.2.0rc1"
        ) from None


def _build_one(repository: Path, source: Source, output: Path, version: str) -> list[Path]:
    """Build the wheel and the sdist from a copy that has the licence beside pyproject.toml, where
    the build finds it."""
    from flit_core.sdist import SdistBuilder
    from flit_core.wheel import make_wheel_in

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(source.folder / source.module, copy / source.module, ignore=ignored)
        for name in ("pyproject.toml", "README.md"):
            shutil.copyfile(source.folder / name, copy / name)
        shutil.copyfile(repository / "LICENSE", copy / "LICENSE")
        for path in (copy / "pyproject.toml", copy / source.module / "__init__.py"):
            _set_version(path, version)
        wheel: Path = make_wheel_in(copy / "pyproject.toml", output).file
        sdist: Path = SdistBuilder.from_ini_path(copy / "pyproject.toml").build(output)
    return [wheel, sdist]


def _set_version(path: Path, version: str) -> None:
    """Replace the version that a file states, if it states one."""
    text = path.read_text("utf-8")
    new = VERSION_LINE.sub(rf'\g<1> = "{version}"', text, count=1)
    if new != text:
        path.write_text(new, "utf-8")


# --- the index ------------------------------------------------------------------------------------


def write_index(folder: Path, files: Iterable[Path]) -> None:
    """Write a static index that pip reads (the Simple Repository API, PEP 503; metadata beside the
    wheels, PEP 658). The files are one folder above it."""
    projects: dict[str, list[Path]] = {}
    for file in sorted(files):
        projects.setdefault(normalized(re.split(r"-\d", file.name)[0]), []).append(file)
    folder.mkdir()
    _write_page(folder, [f'<a href="{name}/">{name}</a>' for name in sorted(projects)])
    for name, group in projects.items():
        (folder / name).mkdir()
        _write_page(folder / name, [_link(file) for file in group])


def _write_page(folder: Path, links: Iterable[str]) -> None:
    lines = "<br>\n".join(links)
    head = '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"></head>'
    (folder / "index.html").write_text(f"{head}<body>\n{lines}\n</body></html>\n", "utf-8")


def _link(file: Path) -> str:
    """Return the link to a file, with its checksum. Writes the metadata of a wheel beside it."""
    link = f'href="../../{file.name}#sha256={_sha256(file)}"'
    if file.suffix == ".whl":
        metadata = file.with_name(f"{file.name}.metadata")
        metadata.write_bytes(_metadata(file))
        python = re.search(r"^Requires-Python: (.+)$", metadata.read_text("utf-8"), re.M)
        assert python is not None, f"{file.name} does not say which Python it needs"
        link += f' data-requires-python="{html.escape(python[1])}"'
        link += f' data-core-metadata="sha256={_sha256(metadata)}"'
    return f"<a {link}>{file.name}</a>"


def _metadata(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (each for each in content.namelist() if each.endswith(".dist-info/METADATA"))
        return content.read(name)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# --- the changelog, and a new version -------------------------------------------------------------


def section(changelog: str, version: str) -> str:
    """Return the part of the changelog about a version. Raises ConfigError if there is none."""
    parts = re.split(r"^(?=## )", changelog, flags=re.M)
    for part in parts:
        if part.startswith((f"## {version},", f"## {version}\n")):
            return part.strip() + "\n"
    raise ConfigError(f"CHANGELOG.md has no section {version}")


def set_version(repository: Path, version: str, day: str) -> list[Path]:
    """Write a new version into the sources, and date the changelog's section of what is unreleased.
    day: YYYY-MM-DD. Returns the files that it wrote. Raises ConfigError."""
    version = checked(version)
    paths: list[Path] = []
    for source in sources(repository):
        module = source.folder / source.module
        paths += [source.folder / "pyproject.toml", module / "__init__.py"]
    for path in paths:
        _set_version(path, version)
    changelog = repository / "CHANGELOG.md"
    text = changelog.read_text("utf-8")
    if not UNRELEASED.search(text):
        raise ConfigError(f"{changelog}: expected a section such as '## {version}, unreleased'")
    changelog.write_text(UNRELEASED.sub(f"## {version}, {day}", text, count=1), "utf-8")
    return [*paths, changelog]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 = built or written, 1 = refused, with the reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, nargs="?", help="an empty or new folder")
    parser.add_argument("--version", help="build this version instead of the sources' one")
    parser.add_argument("--set-version", metavar="VERSION", help="only write it into the sources")
    options = parser.parse_args(arguments)
    if (options.output is None) == (options.set_version is None):
        parser.error("expected a folder, or --set-version VERSION")
    try:
        if options.set_version is not None:
            from datetime import date

            set_version(REPOSITORY, options.set_version, date.today().isoformat())
            return 0
        files = build(REPOSITORY, options.output, options.version)
    except ConfigError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in files) / 2**20
    print(f"{len(files)} files, {size:.0f} MiB: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
