"""The files of the playground, their headers, and what they may refer to."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from pegboard_api_playground.files import FILES, LIBRARIES, MODULES
from pegboard_api_playground.page import PlaygroundApi, read_files
from pegboard_api_playground.plugin import PLAYGROUND
from starlette.testclient import TestClient

from pegboard.cli.main import command_setup
from pegboard.interfaces.api import ApiSetup
from pegboard.plugins.defaults import default_enabled
from pegboard_server.app import build_app
from pegboard_server.serve import make_parser
from pegboard_server.settings import ServerConfig
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_client import FakeEngineClient

STATIC = Path(str(files("pegboard_api_playground"))) / "static"
OURS = [name for name in FILES if not name.startswith("vendor/")]
FIRST_NODE = (20, 19)
"""The first node that reads modules from files that end in .js."""


def make_client(**settings: object) -> TestClient:
    api = PlaygroundApi(None, ApiSetup(None))
    app = build_app([("playground", api, PLAYGROUND)], FakeEngineClient(), ServerConfig(**settings))
    return TestClient(app, follow_redirects=False)


@pytest.fixture
def client() -> TestClient:
    return make_client()


def text(name: str) -> str:
    return (STATIC / name).read_text("utf-8")


def test_contract() -> None:
    check_entry(installed_entry("api", "playground"))


def test_the_table_has_all_files() -> None:
    names = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()]
    assert sorted(names) == sorted(FILES)


@pytest.mark.parametrize("name", ["", *FILES])
def test_a_file_has_strict_headers(client: TestClient, name: str) -> None:
    answer = client.get(f"/playground/{name}")
    assert answer.status_code == 200
    assert answer.content == (STATIC / (name or "index.html")).read_bytes()
    directives = dict(
        part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";")
    )
    assert directives == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    media_types = {
        "html": "text/html",
        "js": "text/javascript",
        "css": "text/css",
        "svg": "image/svg+xml",
        "txt": "text/plain",
    }
    ending = (name or "index.html").rpartition(".")[2]
    assert answer.headers["Content-Type"].split(";")[0] == media_types[ending]


@pytest.mark.parametrize("form", ["{}", "W/{}", '"x", {}'])
def test_a_browser_keeps_a_file_that_is_the_same(client: TestClient, form: str) -> None:
    whole = client.get("/playground/style.css")
    assert whole.headers["Cache-Control"] == "no-cache"
    tag = form.format(whole.headers["ETag"])
    again = client.get("/playground/style.css", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["ETag"] == whole.headers["ETag"]
    other = client.get("/playground/content.css", headers={"If-None-Match": tag})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "nothing",
        "../plugin.py",
        "%2e%2e/plugin.py",
        "..%2fplugin.py",
        "js/../index.html",
        "js/%2e%2e/index.html",
        "js",
        "vendor/",
        "/etc/passwd",
        "index.html/",
        "index.html%00",
    ],
)
def test_only_names_in_the_table_are_served(client: TestClient, path: str) -> None:
    answer = client.request("GET", f"http://testserver/playground/{path}")
    # the client itself resolves some of them, to paths that no api has
    assert answer.status_code == 404 or answer.request.url.path in (
        "/playground/index.html",
        "/playground",
    )
    if answer.status_code == 404:
        assert answer.json()["error"]["code"] == 404


def test_other_methods_are_refused(client: TestClient) -> None:
    assert client.post("/playground/").status_code == 405
    assert client.delete("/playground/index.html").status_code == 405
    head = client.head("/playground/")
    assert (head.status_code, head.content) == (200, b"")


def test_the_short_address_leads_to_the_page(client: TestClient) -> None:
    answer = client.get("/playground")
    assert (answer.status_code, answer.headers["Location"]) == (307, "playground/")


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_it_works_below_a_prefix(prefix: str) -> None:
    client = make_client(root_path="/llm")
    assert client.get(f"{prefix}/playground").headers["Location"] == "playground/"
    assert client.get(f"{prefix}/playground/").status_code == 200
    assert client.get(f"{prefix}/playground/js/main.js").status_code == 200


def test_the_page_needs_no_key() -> None:
    client = make_client(api_key=["k"])
    for name in ("", *FILES):
        assert client.get(f"/playground/{name}").status_code == 200
    assert client.get("/playground").status_code == 307
    assert client.get("/playground/nothing").status_code == 401
    assert client.get("/v1/models").status_code == 401


def test_it_is_off_unless_enabled() -> None:
    assert "playground" not in default_enabled("api")
    assert PLAYGROUND.switches["/playground"] == "--playground"
    parser = make_parser(command_setup("serve"))
    assert parser.parse_settings([])[0].plugins.enable == []
    assert parser.parse_settings(["--playground"])[0].plugins.enable == ["api:playground"]


# --- what the files refer to ----------------------------------------------------------------------


def test_everything_that_the_page_names_exists() -> None:
    page = text("index.html")
    names = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {"js/main.js", "style.css", "content.css", "icon.svg"} <= set(names) <= set(FILES)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for name in re.findall(r'(?:href="#|aria-labelledby="|aria-controls="|for=")([^"]+)"', page):
        assert name in ids, name


@pytest.mark.parametrize("name", MODULES)
def test_everything_that_a_module_names_exists(name: str) -> None:
    source = text(f"js/{name}.js")
    for target in re.findall(r'from "([^"]+)"', source):
        path = (Path("/js") / target).as_posix()
        parts: list[str] = []
        for part in path.strip("/").split("/"):
            parts = parts[:-1] if part == ".." else [*parts, part]
        assert "/".join(parts) in FILES, target
    page = text("index.html")
    for key in re.findall(r'byId\("([^"]+)"\)', source):
        assert f'id="{key}"' in page, key
    for key in re.findall(r'(?:\bicon\("|\biconButton\("|"#icon-)([a-z]+)"', source):
        assert f'id="icon-{key}"' in page, key


def test_all_modules_are_used() -> None:
    sources = [text(f"js/{name}.js") for name in MODULES]
    targets = {
        target.rpartition("/")[2] for each in sources for target in re.findall(r'from "(.+)"', each)
    }
    assert {f"{name}.js" for name in (*MODULES, *LIBRARIES)} == targets | {"main.js"}


@pytest.mark.parametrize("name", OURS)
def test_our_files_name_no_address(name: str) -> None:
    """All addresses are relative to the page. The names of XML's vocabularies are not fetched."""
    source = re.sub(r"http://www\.w3\.org/\d+/svg", "", text(name))
    assert not re.findall(r"""(?:https?:|ws?s?:)?//[\w.-]+\.\w|@import|url\(""", source)
    assert not re.findall(r"""(?:src|href|fetch\()=?["'`(]/""", source)


@pytest.mark.parametrize("name", OURS)
def test_nothing_is_inline(name: str) -> None:
    source = text(name)
    if name.endswith(".html"):
        assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:", source)
        assert re.findall(r"<script[^>]*>([^<]*)", source) == [""]
    if name.endswith(".js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function", source
        )


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_short(name: str) -> None:
    assert len(text(f"js/{name}.js").splitlines()) <= 300


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_have_their_licence_and_version(name: str) -> None:
    licence = text(f"vendor/{name}.LICENSE.txt")
    assert re.search("Apache License|MIT|Redistribution and use", licence)
    version = re.search(r"v?(\d+\.\d+\.\d+)", text(f"vendor/{name}.js")[:300])
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    assert version is not None and version[1] in readme


def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the start, no request opens a file."""
    client = make_client()
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was opened"))
    assert client.get("/playground/").status_code == 200
    with pytest.raises(pytest.fail.Exception):
        read_files()


# --- the modules ----------------------------------------------------------------------------------


def node() -> str | None:
    """The path of a node that is new enough, if there is one."""
    path = shutil.which("node")
    if path is None:
        return None
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return path if numbers >= FIRST_NODE else None


def test_the_modules_do_what_they_say() -> None:
    path = node()
    if path is None:
        pytest.skip(f"needs node {'.'.join(map(str, FIRST_NODE))} or newer")
    script = Path(__file__).with_name("test_modules.mjs")
    result = subprocess.run([path, "--test", str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
