"""The playground in a browser: once with the default model, otherwise with a fake engine, whose
answers are known.

PEGBOARD_TEST_AXE: the file axe.min.js of the npm package axe-core, for the test of accessibility.
PEGBOARD_TEST_PICTURES: a folder for pictures of the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI
from pegboard_api_playground.page import PlaygroundApi
from pegboard_api_playground.plugin import PLAYGROUND
from server_process import MODEL, Server

from pegboard.interfaces.api import ApiSetup
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser
from pegboard_testing.served_app import serving, wait_for

PATIENCE_MS = 60_000
LONG = "word " * 400
EVIL = (
    "<script>window.wasRun = 1</script><img src=x onerror='window.wasRun = 1'>"
    "<img src='http://foreign.example/x.png'><a href='javascript:window.wasRun = 1'>link</a>"
    "<form action='/x'><input name=q></form><style>body { display: none }</style>"
    "<iframe src='http://foreign.example'></iframe><b style='position: fixed'>bold</b>\n\n**kept**"
)
TOOLS = '[{"name": "add", "parameters": {"type": "object"}}]'
CODE = "Write a Python function that says hello to a name. Then explain it in one line."
PROSE = "What is a pegboard good for? Answer in two sentences."
SCHEMES = ("light", "dark")


def answer_to(prompt: str, index: int) -> str:
    """What the fake engine says: it depends on the words of the last message."""
    last = prompt.rsplit("user", 1)[-1]
    if "tool" in last:
        return "The sum is 3."
    if "add" in last:
        return '<think>I *should* add.</think><call add>{"x": 1}</call><call add>{"x": 2}</call>'
    if "evil" in last:
        return EVIL
    if "long" in last:
        return LONG
    return "Hello **you**."


def make_apis(setup: ApiSetup) -> list[tuple[str, Any, Any]]:
    return [
        ("openai", OpenAIApi(None, setup), OPENAI),
        ("playground", PlaygroundApi(None, setup), PLAYGROUND),
    ]


@contextmanager
def fake_server(**settings: Any) -> Iterator[tuple[str, FakeEngineClient]]:
    engine = FakeEngineClient(
        answer_to,
        models=("fake-model", "other-model"),
        delay_s=0.005,
        tool_parser=FakeToolParser,
        reasoning_parser=FakeReasoningParser,
    )
    with serving(make_apis, engine, **settings) as address:
        yield address, engine


@pytest.fixture(scope="module")
def fake() -> Iterator[tuple[str, FakeEngineClient]]:
    with fake_server() as server:
        yield server


Open = Callable[..., Any]


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Opens pages in a fresh profile. No page may have errors, or ask another host for anything.
    is_hostile: the browser may report what the policy has blocked."""
    contexts: list[Any] = []
    faults: list[str] = []

    def open_one(
        address: str, path: str = "/playground", *, is_hostile: bool = False, **options: Any
    ) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((address, "data:", "blob:"))
                else faults.append(f"asked for {request.url}")
            ),
        )
        page.on(
            "console",
            lambda message: (
                faults.append(message.text)
                if "Content Security Policy" in message.text and not is_hostile
                else None
            ),
        )
        page.goto(address + path)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert faults == []


def ready(page: Any) -> Any:
    page.wait_for_selector("#model:not([disabled])")
    return page


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def finished(page: Any, num_answers: int) -> str:
    """Waits until the last answer is complete, and returns its text."""
    answers = page.locator(".answer")
    page.wait_for_function(
        "n => document.querySelectorAll('.answer[aria-busy=false]').length === n", arg=num_answers
    )
    return str(answers.last.locator("> .content").inner_text())


# --- the fake engine ------------------------------------------------------------------------------


def test_messages_are_edited_and_answers_asked_again(
    fake: tuple[str, FakeEngineClient], open_page: Open
) -> None:
    address, engine = fake
    page = ready(open_page(address))
    ask(page, "hi")
    assert finished(page, 1) == "Hello you."
    assert page.locator(".answer strong").inner_text() == "you"
    num_requests = len(engine.requests)
    page.get_by_role("button", name="Regenerate").click()
    assert finished(page, 1) == "Hello you."
    assert len(engine.requests) == num_requests + 1
    page.press("#prompt", "ArrowUp")
    page.locator(".editor textarea").fill("hi again")
    page.locator(".editor textarea").press("Enter")
    finished(page, 1)
    assert page.locator(".bubble").all_inner_texts() == ["hi again"]
    assert len(engine.requests) == num_requests + 2


def test_an_answer_can_be_stopped(fake: tuple[str, FakeEngineClient], open_page: Open) -> None:
    address, engine = fake
    page = ready(open_page(address))
    num_aborted = len(engine.aborted)
    ask(page, "long")
    page.wait_for_function(
        "() => document.querySelector('.answer > .content').innerText.length > 20"
    )
    page.keyboard.press("Escape")
    text = finished(page, 1)
    assert 20 < len(text) < len(LONG) - 20
    assert "stopped" in page.locator(".numbers").inner_text()
    wait_for(lambda: len(engine.aborted) == num_aborted + 1, "the abort")
    ask(page, "hi")
    assert finished(page, 2) == "Hello you."


def test_conversations_outlive_the_page(
    fake: tuple[str, FakeEngineClient], open_page: Open
) -> None:
    page = ready(open_page(fake[0]))
    for number, text in enumerate(("first", "second")):
        ask(page, text)
        finished(page, 1)
        assert page.locator("#conversations li").count() == number + 1
        page.keyboard.press("Control+k")
    page.reload()
    ready(page)
    assert page.locator("#conversations .title").all_inner_texts() == ["second", "first"]
    assert page.locator(".bubble").all_inner_texts() == ["second"]
    page.get_by_role("button", name="first", exact=True).click()
    assert page.locator(".bubble").all_inner_texts() == ["first"]
    page.get_by_role("button", name="Rename first").click()
    page.fill("#rename-dialog input", "renamed")
    page.press("#rename-dialog input", "Enter")
    page.locator("#conversations .current .title", has_text="renamed").wait_for()
    page.get_by_role("button", name="Delete renamed").click()
    page.click("#remove-dialog [data-accept]")
    page.locator("#conversations .title", has_text="renamed").wait_for(state="detached")
    assert page.locator("#conversations .title").all_inner_texts() == ["second"]


def test_two_conversations_stream_at_once(
    fake: tuple[str, FakeEngineClient], open_page: Open
) -> None:
    page = ready(open_page(fake[0]))
    ask(page, "long")
    page.wait_for_selector("#send.stops")
    page.keyboard.press("Control+k")
    ask(page, "hi")
    assert finished(page, 1) == "Hello you."
    page.get_by_role("button", name="long", exact=True).click()
    assert finished(page, 1) == LONG.strip()


def test_export_and_import(
    fake: tuple[str, FakeEngineClient], open_page: Open, tmp_path: Path
) -> None:
    page = ready(open_page(fake[0]))
    ask(page, "hi")
    finished(page, 1)
    page.click("#settings-toggle")
    with page.expect_download() as download:
        page.click("#export-markdown")
    assert "## User\n\nhi" in Path(download.value.path()).read_text()
    with page.expect_download() as download:
        page.click("#export-json")
    assert download.value.suggested_filename == "hi.json"
    path = tmp_path / "hi.json"
    download.value.save_as(path)
    page.set_input_files("#file", path)
    page.locator("#conversations li").nth(1).wait_for()
    path.write_text("[]")
    page.set_input_files("#file", path)
    page.locator("#notice", has_text="not an export").wait_for()


def test_reasoning_is_folded_and_calls_are_answered(
    fake: tuple[str, FakeEngineClient], open_page: Open
) -> None:
    page = ready(open_page(fake[0]))
    page.click("#settings-toggle")
    page.fill("#tools", "[")
    assert "not JSON" in page.locator("#tools-error").inner_text()
    page.fill("#tools", TOOLS)
    ask(page, "add")
    finished(page, 1)
    assert page.locator(".reasoning .content").is_hidden()
    page.click(".reasoning summary")
    assert page.locator(".reasoning em").inner_text() == "should"
    calls = page.locator(".call")
    assert [json.loads(each) for each in calls.locator("pre").all_inner_texts()] == [
        {"x": 1},
        {"x": 2},
    ]
    for number in (0, 1):
        calls.nth(number).locator("textarea").fill(f"tool result {number}")
    page.get_by_role("button", name="Send results").click()
    assert finished(page, 2) == "The sum is 3."
    assert page.locator(".call h4").all_inner_texts() == ["Result", "Result"]


def test_settings_are_sent_and_checked(fake: tuple[str, FakeEngineClient], open_page: Open) -> None:
    address, _ = fake
    page = ready(open_page(address))
    page.click("#settings-toggle")
    page.fill("#temperature", "7")
    assert "at most 2" in page.locator("#temperature-error").inner_text()
    page.fill("#temperature", "0.5")
    page.fill("#max_tokens", "5000")
    assert "at most 4096" in page.locator("#max_tokens-error").inner_text()
    page.fill("#max_tokens", "9")
    page.fill("#stop", "END\nSTOP")
    page.fill("#system", "Be kind.")
    page.fill("#schema", '{"type": "object"}')
    page.select_option("#model", "other-model")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "hi")
    body = request.value.post_data_json
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.5, 9, "other-model")
    assert body["stop"] == ["END", "STOP"]
    assert body["messages"][0] == {"role": "system", "content": "Be kind."}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "top_p" not in body and "tools" not in body


def test_what_a_model_writes_cannot_act(
    fake: tuple[str, FakeEngineClient], open_page: Open
) -> None:
    page = ready(open_page(fake[0], is_hostile=True))
    ask(page, "evil")
    finished(page, 1)
    content = page.locator(".answer > .content")
    assert content.locator("strong").inner_text() == "kept"
    for tag in ("script", "img", "form", "input", "style", "iframe", "[style]", "[onerror]"):
        assert content.locator(tag).count() == 0, tag
    assert content.locator("a[href]").count() == 0
    assert page.evaluate("window.wasRun") is None


def test_a_key_is_asked_for_once(open_page: Open) -> None:
    with fake_server(api_key=["secret"]) as (address, _):
        page = open_page(address)
        page.fill("#key-dialog input", "wrong")
        page.press("#key-dialog input", "Enter")
        page.wait_for_selector("#key-wrong:not([hidden])")
        page.fill("#key-dialog input", "secret")
        page.press("#key-dialog input", "Enter")
        ready(page)
        ask(page, "hi")
        assert finished(page, 1) == "Hello you."
        page.reload()
        ready(page)
        assert page.locator("dialog[open]").count() == 0
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_it_works_below_a_prefix(open_page: Open) -> None:
    with fake_server(root_path="/llm") as (address, _):
        page = ready(open_page(address, "/llm/playground"))
        assert page.url == f"{address}/llm/playground/"
        with page.expect_request("**/v1/chat/completions") as request:
            ask(page, "hi")
        assert request.value.url == f"{address}/llm/v1/chat/completions"
        assert finished(page, 1) == "Hello you."


def test_the_tab_says_how_to_turn_plugins_on(
    fake: tuple[str, FakeEngineClient], open_page: Open
) -> None:
    page = ready(open_page(fake[0]))
    page.click("#plugins-tab")
    page.wait_for_selector("text=--plugins-enable api:admin")


def test_the_keyboard_is_enough(fake: tuple[str, FakeEngineClient], open_page: Open) -> None:
    page = ready(open_page(fake[0]))
    ask(page, "hi")
    finished(page, 1)
    page.locator("#log").focus()
    page.keyboard.press("?")
    assert page.locator("#help-dialog").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#help-dialog").is_hidden()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("Control+k")
    assert page.locator("#welcome").is_visible()
    assert page.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_accessible(
    fake: tuple[str, FakeEngineClient], open_page: Open, scheme: str, width: int
) -> None:
    path = os.environ.get("PEGBOARD_TEST_AXE")
    if not path:
        pytest.skip("needs PEGBOARD_TEST_AXE, the file axe.min.js")
    # only the test itself gets around the page's policy
    page = open_page(
        fake[0], color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True
    )
    ready(page)
    page.add_script_tag(path=path)
    states: dict[str, Callable[[], object]] = {
        "empty": lambda: None,
        "tools": lambda: ask(page, "add"),
        "settings": lambda: page.click("#settings-toggle"),
        "tokens": lambda: (
            page.locator(".switch input").check(),
            page.click("#settings-close"),
            ask(page, "hi"),
            finished(page, 2),
        ),
        "help": lambda: (page.locator("#log").focus(), page.keyboard.press("?")),
        "plugins": lambda: (page.keyboard.press("Escape"), page.click("#plugins-tab")),
    }
    for name, enter in states.items():
        enter()
        if name == "tools":
            finished(page, 1)
        violations = page.evaluate("async () => (await axe.run()).violations")
        shown = [
            (each["id"], [node["html"] for node in each["nodes"]][:3], each["help"])
            for each in violations
        ]
        assert not shown, f"{name}: {shown}"


# --- the default model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--playground", "--plugins-enable", "api:admin")
    with Server(smollm2_gguf, tmp_path_factory.mktemp("server"), *flags) as running:
        yield running.wait_until_ready()


@pytest.mark.real_model
def test_the_default_model(server: Server, open_page: Open) -> None:
    page = ready(open_page(server.url))
    assert page.locator("#model").input_value() == MODEL
    page.click("#settings-toggle")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "64")
    ask(page, "Name the three primary colors in a list.")
    text = finished(page, 1)
    assert "red" in text.lower()
    numbers = page.locator(".numbers").inner_text()
    assert "tokens/s" in numbers and "first after" in numbers
    assert "of 1,024 tokens" in page.locator("#usage").inner_text()
    page.locator("#logprobs").check()
    ask(page, "And a fourth one?")
    finished(page, 2)
    page.locator(".token").nth(1).hover()
    assert page.locator("#tooltip tr").count() == 5
    page.click("#plugins-tab")
    page.locator(".decision summary").first.click()
    assert page.locator(".decision[open] tbody tr").count() >= 1
    page.fill("#plugin-filter", "attention")
    page.wait_for_function("() => document.querySelectorAll('.decision').length < 10")


@pytest.mark.real_model
def test_pictures(server: Server, open_page: Open) -> None:
    """Takes the pictures of docs/playground.md, and one of a narrow screen."""
    folder = os.environ.get("PEGBOARD_TEST_PICTURES")
    if not folder:
        pytest.skip("needs PEGBOARD_TEST_PICTURES, a folder")
    for name, scheme, width in (
        ("light", "light", 1120),
        ("dark", "dark", 1120),
        ("phone", "light", 390),
    ):
        page = open_page(server.url, color_scheme=scheme, viewport={"width": width, "height": 700})
        ready(page)
        page.evaluate("document.querySelector('#settings-toggle').click()")
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "160")
        page.fill("#seed", "7")
        if name == "dark":
            page.locator("#logprobs").check()
        else:
            page.click("#settings-close")
        ask(page, PROSE if name == "dark" else CODE)
        finished(page, 1)
        if name == "dark":
            page.evaluate("() => document.querySelector('#settings .scroll').scrollTo(0, 0)")
            page.locator(".token").nth(21).hover()
        page.screenshot(path=Path(folder) / f"playground-{name}.png")
