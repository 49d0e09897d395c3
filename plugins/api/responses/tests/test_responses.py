"""POST /v1/responses: items, the stream's events, stored responses, and refusals."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_api_responses.api import ResponsesApi
from pegboard_api_responses.history import as_messages, read_input
from pegboard_api_responses.options import ResponsesOptions
from pegboard_api_responses.plugin import RESPONSES
from pegboard_api_responses.store import EventLog, ResponseStore, Stored
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard_testing.contract_api import ApiContract
from pegboard_testing.fake_builtin_tool import TYPES, FakeBuiltinTool
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser
from pegboard_testing.served_app import make_app

ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
TEXT = '<think>hm é</think>So: <call add>{"x": 1}</call><call add>{"x": 2}</call> done'


def apis(setup: ApiSetup, **options: Any) -> Any:
    return [("responses", ResponsesApi(ResponsesOptions(**options), setup), RESPONSES)]


class Responses:
    """A client of one app. It stays open, so that background tasks continue between requests."""

    def __init__(
        self,
        script: Any,
        *,
        parsers: bool = True,
        options: dict[str, Any] | None = None,
        num_processes: int = 1,
        **engine: Any,
    ) -> None:
        if parsers:
            engine = {
                "tool_parser": FakeToolParser,
                "reasoning_parser": FakeReasoningParser,
                **engine,
            }
        self.engine = FakeEngineClient(script, **engine)
        app = make_app(
            partial(apis, **(options or {})), self.engine, api_server_count=num_processes
        )
        self.client = TestClient(app, raise_server_exceptions=False)

    def __enter__(self) -> "Responses":
        self.client.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.client.__exit__(*exc_info)

    def create(self, input: Any = "hello", *, status: int = 200, **fields: Any) -> Any:
        response = self.client.post("/v1/responses", json={"input": input, **fields})
        assert response.status_code == status, response.text
        return (
            read_events(response.text)
            if fields.get("stream") and status == 200
            else response.json()
        )

    def prompt(self) -> str:
        return self.engine.tokenizer().decode(
            self.engine.requests[-1][0].token_ids, skip_special_tokens=False
        )


def read_events(text: str, first: int = 0) -> list[Any]:
    events = []
    for block in filter(None, text.split("\n\n")):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def plain(items: list[Any]) -> list[Any]:
    """Returns the items without their random ids."""
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


def test_an_answer_is_items():
    with Responses(TEXT) as server:
        response = server.create(tools=[ADD])
        assert (response["object"], response["status"], response["error"]) == (
            "response",
            "completed",
            None,
        )
        reasoning, message, first, second, last = response["output"]
        assert reasoning["type"] == "reasoning" and reasoning["content"] == [
            {"type": "reasoning_text", "text": "hm é"}
        ]
        assert (message["role"], message["status"]) == ("assistant", "completed")
        assert message["content"] == [
            {"type": "output_text", "text": "So: ", "annotations": [], "logprobs": []}
        ]
        assert [(c["type"], c["name"], json.loads(c["arguments"])) for c in (first, second)] == [
            ("function_call", "add", {"x": 1}),
            ("function_call", "add", {"x": 2}),
        ]
        assert first["call_id"] != second["call_id"] and last["content"][0]["text"] == " done"
        usage = response["usage"]
        assert usage["output_tokens"] == len(TEXT.encode()) + 1 and usage["input_tokens"] == len(
            server.prompt()
        )
        assert (
            0
            < usage["output_tokens_details"]["reasoning_tokens"]
            < len(b"<think>hm \xc3\xa9</think>") + 1
        )


@pytest.mark.parametrize(
    "fields",
    [{}, {"include_reasoning": False}, {"parallel_tool_calls": False}, {"max_output_tokens": 45}],
)
def test_the_stream_tells_the_same(fields):
    with Responses(TEXT) as server:
        whole = server.create(tools=[ADD], include=["message.output_text.logprobs"], **fields)
        events = server.create(
            tools=[ADD], include=["message.output_text.logprobs"], stream=True, **fields
        )
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    end = events[-1]
    assert end["type"] == f"response.{whole['status']}"
    assert (
        plain(end["response"]["output"]) == plain(whole["output"])
        and end["response"]["usage"] == whole["usage"]
    )
    items: dict[int, Any] = {}
    for event in events[2:-1]:
        kind = event["type"]
        index = event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(items)
            items[index] = {"text": "", "id": event["item"]["id"], "logprobs": []}
            continue
        item = items[index]
        assert "done" not in item, "nothing follows the end of an item"
        if kind == "response.output_item.done":
            item["done"] = event["item"]
        else:
            assert event["item_id"] == item["id"]
        if kind.endswith(".delta"):
            item["text"] += event["delta"]
            item["logprobs"] += event.get("logprobs", ())
    assert [item["done"] for item in items.values()] == end["response"]["output"]
    for item in items.values():
        done = item["done"]
        assert item["text"] == (
            done["arguments"] if done["type"] == "function_call" else done["content"][0]["text"]
        )
        if done["type"] == "message":
            assert item["logprobs"] == done["content"][0]["logprobs"] and item["logprobs"]


def test_a_cut_off_answer_is_incomplete():
    with Responses(TEXT) as server:
        response = server.create(max_output_tokens=12)
        assert response["status"] == "incomplete" and response["incomplete_details"] == {
            "reason": "max_output_tokens"
        }
        assert response["output"][-1]["status"] == "incomplete"


def test_a_tool_loop_over_stored_responses():
    seen = []

    def script(prompt: str, index: int) -> str:
        seen.append(prompt)
        return (
            '<think>I add</think><call add>{"x": 1}</call>' if "tool:" not in prompt else "It is 2."
        )

    with Responses(script) as server:
        first = server.create("1 + 1?", tools=[ADD], instructions="Be brief.")
        (call,) = [item for item in first["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        second = server.create([result], tools=[ADD], previous_response_id=first["id"])
        assert (
            second["output"][0]["content"][0]["text"] == "It is 2."
            and second["previous_response_id"] == first["id"]
        )
        assert seen[0].startswith("[tools 1]system: Be brief.\nuser: 1 + 1?")
        assert seen[1] == "[tools 1]user: 1 + 1?\nassistant: \ntool: 2\nassistant: ", (
            "instructions apply to one response only"
        )
        by_hand = [{"role": "user", "content": "1 + 1?"}, *first["output"], result]
        server.create(by_hand, tools=[ADD], store=False)
        assert seen[2] == seen[1]


def test_items_become_the_messages_of_turns():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "r"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "message", "role": "assistant", "content": "c"},
    ]
    messages = read_input(items)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert (messages[1]["reasoning"], messages[1]["content"]) == ("r", "b")
    assert [call["function"]["name"] for call in messages[1]["tool_calls"]] == ["f", "g"]
    assert messages[3] == {"role": "assistant", "reasoning": "s", "content": "c"}
    assert as_messages(items[1:5]) == messages[1:2]


def test_what_is_kept_is_bounded_and_can_be_forgotten():
    with Responses("ok", options={"max_stored": 2}) as server:
        names = [server.create()["id"] for _ in range(3)]
        get = server.client.get
        assert [get(f"/v1/responses/{name}").status_code for name in names] == [404, 200, 200]
        assert get(f"/v1/responses/{names[1]}").json()["output"][0]["content"][0]["text"] == "ok"
        assert server.client.delete(f"/v1/responses/{names[1]}").json()["deleted"] is True
        assert get(f"/v1/responses/{names[1]}").status_code == 404
        assert (
            server.create(previous_response_id=names[0], status=404)["error"]["param"]
            == "previous_response_id"
        )
        unkept = server.create(store=False)["id"]
        assert get(f"/v1/responses/{unkept}").status_code == 404
    with Responses("ok", options={"max_stored_bytes": 5000}) as server:
        names = [server.create("x" * 1500)["id"] for _ in range(4)]
        found = [server.client.get(f"/v1/responses/{name}").status_code for name in names]
        assert found[0] == 404 and found[-1] == 200


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "delete", "busy"]), st.integers(0, 5), st.integers(0, 40)
        ),
        max_size=40,
    ),
    st.integers(1, 4),
    st.integers(0, 100),
)
def test_what_is_stored_is_counted(
    calls: list[tuple[str, int, int]], most: int, most_bytes: int
) -> None:
    """The oldest ones go first, until the rest is within both limits. What is still written
    stays."""
    store = ResponseStore(ResponsesOptions(max_stored=most, max_stored_bytes=most_bytes))
    kept = {}
    for call, number, num_bytes in calls:
        kept.pop(number, None)
        if call == "delete":
            store.delete(str(number))
            continue
        stored = Stored({"id": str(number)}, task=object() if call == "busy" else None)
        store.put(stored, num_bytes)
        kept[number] = (call, num_bytes)
        for old in list(kept):
            if (len(kept) > most or sum(size for _, size in kept.values()) > most_bytes) and kept[
                old
            ][0] == "put":
                del kept[old]
        assert list(store._stored) == [str(number) for number in kept]
    for number in range(6):
        store.delete(str(number))
    assert store._num_bytes == 0 and not store._stored


@pytest.mark.parametrize("more", [{"options": {"max_stored": 0}}, {"num_processes": 2}])
def test_a_server_that_keeps_nothing_says_so(more):
    with Responses("ok", **more) as server:
        first = server.create()
        error = server.create(previous_response_id=first["id"], status=404)["error"]
        assert error["param"] == "previous_response_id" and "keeps no responses" in error["message"]
        assert (
            "keeps no responses" in server.create(background=True, status=400)["error"]["message"]
        )


def wait_for(server: Responses, name: str, *statuses: str) -> Any:
    deadline = time.monotonic() + 30
    while (response := server.client.get(f"/v1/responses/{name}").json()).get(
        "status"
    ) not in statuses:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return response


def test_background_and_cancel():
    with Responses("a long answer", delay_s=0.002) as server:
        started = server.create(background=True)
        assert started["status"] in ("queued", "in_progress") and started["usage"] is None
        assert (
            wait_for(server, started["id"], "completed")["output"][0]["content"][0]["text"]
            == "a long answer"
        )
        follow = server.create(previous_response_id=started["id"])
        assert "assistant: a long answer" in server.prompt() and follow["status"] == "completed"
    with Responses("endless " * 200, delay_s=0.05) as server:
        started = server.create(background=True)
        wait_for(server, started["id"], "in_progress")
        assert (
            "still being written"
            in server.create(previous_response_id=started["id"], status=400)["error"]["message"]
        )
        cancelled = server.client.post(f"/v1/responses/{started['id']}/cancel").json()
        assert cancelled["status"] == "cancelled" and wait_for(server, started["id"], "cancelled")
        assert server.engine.running == set()
        done = server.create(max_output_tokens=1)
        refused = server.client.post(f"/v1/responses/{done['id']}/cancel")
        assert refused.status_code == 400 and "background" in refused.json()["error"]["message"]


def test_a_background_stream_can_be_read_again():
    with Responses("a long answer") as server:
        events = server.create(background=True, stream=True)
        name = events[0]["response"]["id"]
        assert [event["type"] for event in events[:2]] == [
            "response.created",
            "response.in_progress",
        ]
        assert (
            events[-1]["type"] == "response.completed"
            and events[0]["response"]["background"] is True
        )
        path = f"/v1/responses/{name}"
        assert plain(server.client.get(path).json()["output"]) == plain(
            events[-1]["response"]["output"]
        )
        assert read_events(server.client.get(path, params={"stream": "true"}).text) == events
        for after in (0, 3, len(events) - 1, len(events) + 7):
            again = server.client.get(path, params={"stream": "true", "starting_after": after})
            assert read_events(again.text, first=after + 1) == events[after + 1 :]
        follow = server.create(previous_response_id=name)
        assert "assistant: a long answer" in server.prompt() and follow["status"] == "completed"


def test_whoever_leaves_a_background_stream_does_not_end_it():
    async def run() -> None:
        log = EventLog()
        await log.add([{"type": "a"}])
        first = log.read()
        second = log.read(0)
        assert b'"sequence_number":0' in await anext(first)
        await first.aclose()
        waiting = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        await log.add([{"type": "b"}, {"type": "c"}])
        log.end()
        news = await waiting
        assert news.count(b"event: ") == 2 and b'"sequence_number":2' in news
        assert [part async for part in second] == [] and [part async for part in log.read(2)] == []
        assert log.num_bytes == len(b"".join([part async for part in log.read()]))

    asyncio.run(run())


def test_a_background_stream_that_fails_or_is_cancelled_ends():
    with Responses("abc", fail_after=2) as server:
        events = server.create(background=True, stream=True)
        assert (
            events[-1]["type"] == "response.failed"
            and events[-1]["response"]["error"]["code"] == "server_error"
        )
        assert wait_for(server, events[0]["response"]["id"], "failed")
    with Responses("endless " * 200, delay_s=0.05) as server, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(server.create, background=True, stream=True, request_id="mine")
        wait_for(server, "mine", "in_progress")
        assert server.client.post("/v1/responses/mine/cancel").json()["status"] == "cancelled"
        events = reading.result(30)
        assert (
            events[0]["type"] == "response.created" and events[-1]["type"] != "response.completed"
        )
        assert server.engine.running == set()


def test_what_a_retrieval_may_ask_for():
    with Responses("ok") as server:
        path = f"/v1/responses/{server.create()['id']}"
        for query, param in (
            ({"stream": "true"}, "stream"),
            ({"stream": "maybe"}, "stream"),
            ({"starting_after": 1}, "starting_after"),
            ({"stream": "true", "starting_after": "-1"}, "starting_after"),
            ({"include_obfuscation": "true"}, "include_obfuscation"),
            ({"include": "x"}, "include"),
        ):
            response = server.client.get(path, params=query)
            assert response.status_code == 400 and response.json()["error"]["param"] == param, query
        assert (
            server.client.get(
                path, params={"stream": "false", "include_obfuscation": "false"}
            ).json()["status"]
            == "completed"
        )


def test_an_engine_that_fails():
    with Responses("abc", fail_after=2) as server:
        assert "told to fail" in server.create(status=500)["error"]["message"]
        end = server.create(stream=True)[-1]
        assert (
            end["type"] == "response.failed"
            and "told to fail" in end["response"]["error"]["message"]
        )
        started = server.create(background=True)
        assert wait_for(server, started["id"], "failed")["error"]["code"] == "server_error"


def test_structure_and_sampling_reach_the_engine():
    with Responses("{}", parsers=False) as server:
        form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
        server.create(
            text={"format": form},
            temperature=0.5,
            top_k=3,
            seed=1,
            max_output_tokens=7,
            truncation="auto",
        )
        params = server.engine.requests[-1][1]
        assert json.loads(params.structured_outputs.json) == {"type": "object"}
        assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 3, 1, 7)
        assert params.truncate_prompt_tokens == -1
        server.create(text={"format": {"type": "json_object"}}, logit_bias={"7": 200})
        assert server.engine.requests[-1][1].logit_bias == {7: 100.0}
        assert server.engine.requests[-1][1].structured_outputs.json_object is True
        server.create(
            structured_outputs={"choice": ["a", "b"]}, reasoning={"effort": "none"}, priority=3
        )
        assert server.engine.requests[-1][1].structured_outputs.choice == ["a", "b"]
        assert server.engine.requests[-1][2].priority == 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_forced_calls(choice):
    script = '[{"name": "add", "parameters": {"x": 3}}]' if choice == "required" else '{"x": 3}'
    with Responses(script, parsers=False) as server:
        for stream in (False, True):
            answer = server.create(tools=[ADD], tool_choice=choice, stream=stream)
            (call,) = (answer[-1]["response"] if stream else answer)["output"]
            assert (call["name"], json.loads(call["arguments"])) == ("add", {"x": 3}) and call[
                "call_id"
            ].startswith("call_")


BUILT_IN = [
    "web_search",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "code_interpreter",
    "container",
    "file_search",
    "computer_use_preview",
    "image_generation",
    "local_shell",
    "mcp",
    "custom",
]


@pytest.mark.parametrize("kind", BUILT_IN)
def test_tools_that_the_server_would_have_to_run_are_refused_by_name(kind):
    with Responses("x", parsers=False) as server:
        error = server.create(tools=[ADD, {"type": kind, "container": "auto"}], status=400)["error"]
    assert error["param"] == "tools[1].type" and repr(kind) in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
        ),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"background": True, "store": False}, "background"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": True}},
            "stream_options.include_usage",
        ),
        ({"stream_options": {}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"enable_response_messages": True}, "enable_response_messages"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"structured_outputs": {"shape": "round"}}, "structured_outputs"),
    ],
)
def test_refusals_name_the_field(fields, param):
    with Responses("x") as server:
        assert server.create(status=400, **{"input": "x", **fields})["error"]["param"] == param
        assert server.engine.requests == []


def test_input_tokens_counts_the_prompt() -> None:
    with Responses("x") as server:
        first = server.create("one", instructions="Be brief.")
        fields = {
            "input": "two",
            "previous_response_id": first["id"],
            "tools": [ADD],
            "instructions": "Be kind.",
        }
        answer = server.client.post("/v1/responses/input_tokens", json=fields).json()
        server.create(fields.pop("input"), **fields)
        assert answer == {
            "object": "response.input_tokens",
            "input_tokens": len(server.engine.requests[-1][0].token_ids),
        }
        refused = server.client.post(
            "/v1/responses/input_tokens", json={"input": "two", "temperature": 1}
        )
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
        unknown = server.client.post(
            "/v1/responses/input_tokens", json={"input": "two", "previous_response_id": "none"}
        )
        assert unknown.status_code == 404


def test_input_items_are_listed_in_pages() -> None:
    with Responses("x") as server:
        first = server.create("one")
        part = {"type": "input_text", "text": "three", "unknown": 1}
        items = [
            {"role": "user", "content": "two", "id": "mine"},
            {"type": "message", "role": "user", "content": [part]},
        ]
        second = server.create(items, previous_response_id=first["id"])

        def listed(**query: Any) -> Any:
            return server.client.get(f"/v1/responses/{second['id']}/input_items", params=query)

        whole = listed(order="asc").json()
        assert [item["content"][0]["text"] for item in whole["data"]] == [
            "one",
            "x",
            "two",
            "three",
        ]
        ids = [item["id"] for item in whole["data"]]
        assert (
            ids[1:3] == [first["output"][0]["id"], "mine"]
            and len(set(ids)) == 4
            and not whole["has_more"]
        )
        assert [item["id"] for item in listed().json()["data"]] == ids[::-1]
        page = listed(limit=2, after=ids[-1]).json()
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
        assert listed(after=ids[0]).json()["data"] == []
        for name, value in {"limit": "0", "order": "up", "after": "none", "before": "x"}.items():
            error = listed(**{name: value}).json()["error"]
            assert (error["code"], error["param"]) == (400, name)
        assert server.client.get("/v1/responses/none/input_items").status_code == 404


class TestResponses(ApiContract):
    path = "/v1/responses"
    plain: ClassVar[dict[str, Any]] = {"input": "hello"}
    body: ClassVar[dict[str, Any]] = {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "r"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b", "annotations": []}],
            },
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            {
                "type": "mcp_call",
                "id": "mcp_1",
                "server_label": "s",
                "name": "n",
                "arguments": "{}",
                "output": "x",
                "error": None,
            },
            {
                "type": "code_interpreter_call",
                "id": "ci_1",
                "code": "1",
                "outputs": [{"type": "logs", "logs": "1"}],
            },
            {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x"}},
        ],
        "tools": [ADD, {"type": "mcp", "server_label": "calc"}, {"type": "code_interpreter"}],
        "tool_choice": {"type": "mcp", "server_label": "calc", "name": "add"},
        "max_tool_calls": 2,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "max_output_tokens": 4,
        "stop": ["x"],
        "metadata": {"a": "b"},
        "structured_outputs": None,
    }
    builtin_tools: ClassVar[dict[str, Any]] = {kind: [FakeBuiltinTool()] for kind in TYPES}

    def apis(self, setup: ApiSetup) -> Any:
        return apis(setup)
