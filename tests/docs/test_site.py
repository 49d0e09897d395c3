"""The documentation as a site: it is built in strict mode, each of its links leads somewhere, and
nothing comes from another host."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from pegboard.interfaces import KINDS
from pegboard_testing.authoring import release, site

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """The links and the anchors of a page. loaded: what a browser fetches by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every HTML file of the site."""
    folder = tmp_path_factory.mktemp("site")
    site.build(ROOT, folder)
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


def targets(path: Path, links: list[str]) -> Iterator[tuple[Path, str]]:
    """Yields the file and the anchor of each link to the site itself."""
    for link in links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            yield target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are absolute, because it is shown at any path
        for target, anchor in targets(path, [*page.links, *page.loaded]):
            assert target.is_file(), f"{path.name} links to {target}"
            if target in pages:
                assert anchor in pages[target].anchors, f"{path.name} links to {target}#{anchor}"


def test_nothing_is_fetched_from_elsewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        foreign = [each for each in page.loaded if urlsplit(each).netloc]
        assert not foreign, f"{path.name} fetches {foreign}"


def test_the_site_has_every_kind_package_and_guide(pages: dict[Path, Page]) -> None:
    names = {"/".join(path.parts[-2:]) for path in pages}
    assert {f"kinds/{kind}.html" for kind in KINDS} <= names
    assert {f"packages/{source.name}.html" for source in release.sources(ROOT)} <= names
    guides = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert guides <= {path.stem for path in pages}


def test_a_guide_that_no_menu_has_is_an_error(tmp_path: Path) -> None:
    """The order of the guides is written by hand, so a new one could be forgotten."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    told = {line.rpartition(": ")[2] for line in text.splitlines() if line.endswith(".md")}
    guides = {path.name for path in (ROOT / "docs").glob("*.md")} - {"kinds.md"}
    assert guides == told - {"index.md", "contributing.md", "changelog.md"}
