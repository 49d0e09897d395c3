"""The statements of the pages about the repository are true: links, files, generated parts,
lists."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from pages import PACKAGE_PAGES, PAGES, ROOT, anchors, blocks, links, prose

from pegboard.config.sections import all_settings
from pegboard.interfaces import KINDS
from pegboard_chat.request_body import REFUSED
from pegboard_testing.authoring import generate, kind_pages, models_page, reference

CORE = ROOT / "core/pegboard/pegboard"
HANDED_OUT = {"EngineClient", "RequestView"}
"""Interfaces that core implements and that plugins only call or read."""
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
KIND_PAGES = sorted((ROOT / "docs/kinds").glob("*.md"))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS, *KIND_PAGES, *PACKAGE_PAGES], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(target), (
            f"{name(page)} links to #{anchor}, which {name(target.resolve())} lacks"
        )


@pytest.mark.parametrize("page", [*PAGES, *PACKAGE_PAGES], ids=name)
def test_named_files_exist(page: Path) -> None:
    """Every text in backticks that looks like a file of the repository is a file. A text that
    begins with a slash is a route. Decision pages are left out, because they name the files of
    their time."""
    named = re.findall(r"`([\w.-][\w./-]*\.(?:py|md|toml|json))`", prose(page))
    missing = [path for path in named if not _is_here(path, page)]
    assert not missing, f"{name(page)} names files that are not there: {missing}"


OF_MODELS = {
    "config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "tokenizer.json",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
}


def _is_here(path: str, page: Path) -> bool:
    if path in OF_MODELS or path.startswith("model."):
        return True
    if "/" not in path:
        return any(
            next((ROOT / folder).rglob(path), None) for folder in ("core", "plugins", "examples")
        )
    return any((folder / path).exists() for folder in (ROOT, CORE, page.parent))


def test_generated_files_are_current() -> None:
    """If `snapshot.txt` is stale, an interface changed. If that is intended, the commit also needs
    a line in the changelog, and the contract tests of the kind."""
    assert generate.main(["--check"]) == 0


def test_the_page_of_models_contradicts_no_entry_point() -> None:
    data = {"fallback": ["A"], "missing": {"states": ["C"]}, "remarks": {"eager": ["B"]}}
    assert [way for _, way, _ in models_page.rows(data, {"B": "own"})] == [
        "fallback",
        "`own`",
        "not yet",
    ]
    assert [remark for _, _, remark in models_page.rows(data, {"B": "own"})] == [
        "",
        "eager",
        "states",
    ]
    for own in ({"A": "own", "B": "own"}, {"B": "own", "C": "own"}, {}):
        with pytest.raises(ValueError, match="is wrong about"):
            list(models_page.rows(data, own))


def test_a_stale_page_is_noticed_and_renewed(tmp_path: Path) -> None:
    pages = {tmp_path / page.name: make for page, make in reference.PAGES.items()}
    for page in reference.PAGES:
        text = (
            page.read_text("utf-8")
            .replace("scheduler.py ", "gone.py ")
            .replace("`--port`", "`--gone`")
        )
        (tmp_path / page.name).write_text(text, "utf-8")
    changed = {tmp_path / "configuration.md", tmp_path / "tour.md"}
    assert set(generate.stale(pages)) == changed == set(generate.stale(pages, write=True))
    assert not generate.stale(pages)
    assert "scheduler.py " in (tmp_path / "tour.md").read_text("utf-8")


def test_the_page_of_a_kind_has_every_method_and_field() -> None:
    for kind in KINDS.values():
        text = (ROOT / f"docs/kinds/{kind.name}.md").read_text("utf-8")
        for item in vars(import_module(kind.spec.partition(":")[0])).values():
            if (
                inspect.isclass(item)
                and getattr(item, "_is_protocol", False)
                and item.__module__ == kind.spec.partition(":")[0]
            ):
                methods = [
                    method
                    for method in vars(item)
                    if not method.startswith("_") and callable(getattr(item, method))
                ]
                assert all(f"- `{method}(" in text for method in methods)
                assert f"## `{item.__name__}`" in text
                fits = (
                    1 <= len(methods) + ("__call__" in vars(item)) <= 7
                    or item.__name__ in HANDED_OUT
                )
                assert fits, (
                    f"README: interfaces have at most seven methods; {item.__name__} has "
                    f"{len(methods)}"
                )


def test_the_settings_of_the_kinds_exist() -> None:
    names = {*all_settings(), "plugins_enable"}
    for kind, setting in kind_pages.SETTINGS.items():
        assert kind in KINDS
        if setting.startswith("--"):
            name = setting.removeprefix("--").partition(".")[0]  # a field of it may follow
            assert name.replace("-", "_") in names, f"{kind}: {setting}"


def test_readme_counts_the_kinds() -> None:
    assert f"[{len(KINDS)} kinds](docs/kinds.md)" in (ROOT / "README.md").read_text("utf-8")


def test_what_vllm_page_calls_missing_is_missing() -> None:
    page = ROOT / "docs/vllm.md"
    table = page.read_text("utf-8").partition("**Flags** that do not exist:")[2]
    ours = {f"--{setting.name.replace('_', '-')}" for setting in all_settings().values()}
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `--")]
    assert rows
    missing = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)`", row[1])}
    offered = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)`", row[2])}
    assert not missing & ours
    assert offered <= ours
    (listed,) = (block.text.split() for block in blocks(page) if block.language == "text")
    # chats refuse it, completions have it
    assert listed == sorted(set(REFUSED) - {"prompt_embeds"})


def test_glossary_names_are_the_codes_names() -> None:
    """Every name in backticks in the first column is a name in core."""
    source = "\n".join(path.read_text("utf-8") for path in CORE.rglob("*.py"))
    text = (ROOT / "docs/glossary.md").read_text("utf-8")
    first = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]
    words = {word for cell in first for word in re.findall(r"`(\w+)`", cell)}
    assert len(words) > 20
    assert not [word for word in sorted(words) if not re.search(rf"\b{word}\b", source)]
