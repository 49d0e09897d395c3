"""Built-in tools of POST /v1/responses: the server runs the calls of the model, and the model
continues within the same response."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pegboard_api_responses.api import ResponsesApi
from pegboard_api_responses.options import ResponsesOptions
from pegboard_api_responses.plugin import RESPONSES
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from pegboard.interfaces.api import ApiSetup
from pegboard.interfaces.builtin_tool import ToolOutput
from pegboard.interfaces.tokenizer import Chat, Rendered
from pegboard_testing.fake_builtin_tool import TYPES, FakeBuiltinTool, FakeToolSession
from pegboard_testing.fake_client import ByteTokenizer, FakeEngineClient
from pegboard_testing.fake_parsers import FakeReasoningParser, FakeToolParser
from pegboard_testing.served_app import make_app, posted, serving, wait_for

CALC = {"type": "mcp", "server_label": "calc"}
CODE = {"type": "code_interpreter"}
SEARCH = {"type": "web_search"}
CLIENTS = {"type": "function", "name": "mine", "parameters": {"type": "object", "properties": {}}}
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ALL = [CALC, CODE, SEARCH, CLIENTS]
Script = Callable[[str, int], str]


class RecordingTokenizer(ByteTokenizer):
    """Remembers the chats that it renders."""

    def __init__(self) -> None:
        self.chats: list[Chat] = []

    def render(self, chat: Chat) -> Rendered:
        self.chats.append(chat)
        return super().render(chat)


def apis(setup: ApiSetup, **options: Any) -> Any:
    return [("responses", ResponsesApi(ResponsesOptions(**options), setup), RESPONSES)]


class Server:
    """The api `responses` with a fake engine and the fake of built-in tools."""

    def __init__(
        self,
        *turns: str,
        options: dict[str, Any] | None = None,
        parsers: bool = True,
        **engine: Any,
    ) -> None:
        if parsers:
            engine = {
                "tool_parser": FakeToolParser,
                "reasoning_parser": FakeReasoningParser,
                **engine,
            }
        self.engine = FakeEngineClient(
            lambda prompt, index: turns[min(prompt.count("tool: "), len(turns) - 1)], **engine
        )
        self.tokenizer = self.engine._tokenizer = RecordingTokenizer()
        self.tool = FakeBuiltinTool()
        app = make_app(
            partial(apis, **(options or {})), self.engine, {kind: [self.tool] for kind in TYPES}
        )
        self.client = TestClient(app, raise_server_exceptions=False)

    def __enter__(self) -> "Server":
        self.client.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.client.__exit__(*exc_info)
        assert not self.engine.running
        assert all(session.num_closed == 1 for session in self.tool.sessions)

    def create(self, input: Any = "hello", *, status: int = 200, **fields: Any) -> Any:
        """Returns the response, or the events of a stream. The official client must be able to read
        both."""
        response = self.client.post("/v1/responses", json={"input": input, "tools": ALL, **fields})
        assert response.status_code == status, response.text
        if status != 200:
            return response.json()
        if not fields.get("stream"):
            body = response.json()
            Response.model_validate({**body, "tools": []})  # tools are those that the test has sent
            return body
        events = [
            json.loads(block.partition("data: ")[2])
            for block in response.text.split("\n\n")
            if block
        ]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            more = {"response": {**event["response"], "tools": []}} if "response" in event else {}
            STREAM_EVENT.validate_python({**event, **more})
        return events

    def messages(self, chat: int = -1) -> list[Any]:
        """Returns the messages that the template got, without the ids of calls."""
        found = []
        for message in self.tokenizer.chats[chat].messages:
            plain = {
                name: value
                for name, value in message.items()
                if name not in ("tool_call_id", "tool_calls")
            }
            if "tool_calls" in message:
                plain["calls"] = [
                    (call["function"]["name"], call["function"]["arguments"])
                    for call in message["tool_calls"]
                ]
            found.append(plain)
        return found


def plain(items: list[Any]) -> list[Any]:
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


def kinds(response: Any) -> list[str]:
    return [item["type"] for item in response["output"]]


ADD = '<think>I add</think>So: <call calc_add>{"x": 1, "y": 2}</call>'
PYTHON = '<call python>{"code": "print(1)\\n"}</call>'
FIND = '<call browser_search>{"query": "é"}</call>'
ANSWER = "<think>Got it</think>It is 3."


def test_the_server_runs_what_the_model_calls():
    with Server(ADD, ANSWER) as server:
        response = server.create("1 + 2?", instructions="Be brief.")
        assert kinds(response) == ["reasoning", "message", "mcp_call", "reasoning", "message"]
        call = response["output"][2]
        answer = response["output"][4]
        assert (call["server_label"], call["name"], call["status"]) == ("calc", "add", "completed")
        assert (call["arguments"], call["output"], call["error"]) == ('{"x": 1, "y": 2}', "3", None)
        assert call["id"].startswith("mcp_") and answer["content"][0]["text"] == "It is 3."
        assert server.tool.sessions[0].calls == [("calc_add", {"x": 1, "y": 2})]
        assert server.tool.sessions[0].response_id == response["id"]
        assert server.messages() == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 2?"},
            {
                "role": "assistant",
                "reasoning": "I add",
                "content": "So: ",
                "calls": [("calc_add", {"x": 1, "y": 2})],
            },
            {"role": "tool", "content": "3"},
        ]
        names = [tool["function"]["name"] for tool in server.tokenizer.chats[0].tools]
        assert (
            names[0] == "calc_add"
            and names[-1] == "mine"
            and {"python", "browser_search"} < set(names)
        )
        assert response["tools"] == ALL and response["tool_choice"] == "auto"
        prompts = [len(prompt.token_ids) for prompt, _, _ in server.engine.requests]
        usage = response["usage"]
        assert len(prompts) == 2 and usage["input_tokens"] == sum(prompts)
        assert usage["output_tokens"] == len(ADD.encode()) + len(ANSWER.encode()) + 2
        assert usage["output_tokens_details"]["reasoning_tokens"] == len("I add") + len("Got it")


def test_names_in_the_way_of_gpt_oss():
    with Server('<call browser.search>{"query": "x"}</call>', ANSWER) as server:
        assert kinds(server.create())[0] == "web_search_call"
        assert server.tool.sessions[2].calls == [("browser_search", {"query": "x"})]
        assert server.messages()[1]["calls"] == [("browser_search", {"query": "x"})]
        own = {**CLIENTS, "name": "browser.search"}
        assert kinds(server.create(tools=[SEARCH, own])) == ["function_call"], (
            "the client's own is meant"
        )


def test_the_ids_of_requests_and_calls_are_all_different():
    with Server(ADD, ADD, ADD, ANSWER) as server:
        response = server.create()
        assert kinds(response).count("mcp_call") == 3 and len(server.tool.sessions[0].calls) == 3
        assert len({item["id"] for item in response["output"]}) == len(response["output"])
        assert len({options.request_id for _, _, options in server.engine.requests}) == 4


EVENTS = {
    "mcp_call": [
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
    ],
    "code_interpreter_call": [
        "output_item.added",
        "code_interpreter_call.in_progress",
        "code_interpreter_call_code.delta",
        "code_interpreter_call_code.done",
        "code_interpreter_call.interpreting",
        "code_interpreter_call.completed",
        "output_item.done",
    ],
    "web_search_call": [
        "output_item.added",
        "web_search_call.in_progress",
        "web_search_call.searching",
        "web_search_call.completed",
        "output_item.done",
    ],
}


@pytest.mark.parametrize(("kind", "call"), [*zip(EVENTS, (ADD, PYTHON, FIND), strict=True)])
def test_the_stream_tells_the_same(kind: str, call: str):
    with Server(call, ANSWER) as server:
        whole = server.create()
        events = server.create(stream=True)
    end = events[-1]
    assert end["type"] == "response.completed" and plain(end["response"]["output"]) == plain(
        whole["output"]
    )
    assert end["response"]["usage"] == whole["usage"]
    index = kinds(whole).index(kind)
    about = [event for event in events if event.get("output_index") == index]
    names = [event["type"].removeprefix("response.") for event in about]
    assert list(dict.fromkeys(names)) == EVENTS[kind]
    assert (
        about[0]["item"]["status"] == "in_progress"
        and about[-1]["item"] == end["response"]["output"][index]
    )
    assert all(event["item_id"] == about[0]["item"]["id"] for event in about[1:-1])
    deltas = "".join(event.get("delta", "") for event in about)
    item = about[-1]["item"]
    assert deltas == {
        "mcp_call": item.get("arguments"),
        "code_interpreter_call": item.get("code"),
    }.get(kind, "")
    done = [
        event["output_index"] for event in events if event["type"] == "response.output_item.done"
    ]
    assert done == list(range(len(whole["output"])))


def test_items_say_what_was_done():
    calls = (
        PYTHON
        + FIND
        + (
            '<call browser_open>{"id": "http://a"}</call><call browser_find>{"pattern": "x", '
            '"cursor": 2}</call>'
        )
    )
    with Server(calls, ANSWER) as server:
        code, search, opened, found = server.create()["output"][:4]
        assert (code["code"], code["container_id"]) == ("print(1)\n", "auto")
        assert code["outputs"] == [{"type": "logs", "logs": "python says 'print(1)\\n'"}]
        assert search["action"] == {"type": "search", "query": "é"}
        assert opened["action"] == {"type": "open_page", "url": "http://a"}
        assert found["action"] == {"type": "find_in_page", "url": "cursor:2", "pattern": "x"}
        assert [item["id"].partition("_")[0] for item in (code, search)] == ["ci", "ws"]


@given(
    st.lists(
        st.sampled_from(
            [ADD, PYTHON, FIND, "<call calc_fail>{}</call>", "Hm. ", "<think>a</think>"]
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=25, deadline=None)
def test_any_turns_whole_and_streamed(parts: list[str]):
    with Server("".join(parts), ANSWER) as server:
        whole = server.create()
        end = server.create(stream=True)[-1]["response"]
        assert plain(end["output"]) == plain(whole["output"]) and end["usage"] == whole["usage"]
        num_calls = sum(part.count("<call") for part in parts)
        assert len([kind for kind in kinds(whole) if kind.endswith("_call")]) == num_calls
        assert (kinds(whole)[-1] == "message") == (num_calls > 0 or parts[-1] == "Hm. ")


def test_what_a_tool_finds_wrong_is_told_to_the_model():
    broken = [
        ("calc_fail", "{}"),
        ("calc_crash", "{}"),
        ("calc_wait", "{}"),
        ("calc_add", "{no"),
        ("python", "[]"),
    ]
    calls = "".join(f"<call {name}>{arguments}</call>" for name, arguments in broken)
    with Server(calls, "Sorry.", options={"tool_timeout_s": 0.001}) as server:
        response = server.create()
        *failed, answer = response["output"]
        assert response["status"] == "completed" and answer["content"][0]["text"] == "Sorry."
        assert [item["status"] for item in failed] == ["failed"] * 5
        texts = [message["content"] for message in server.messages() if message["role"] == "tool"]
        assert texts[:2] == ["cannot", "calc_crash failed with OSError"]
        assert (
            "within 0.001 s" in texts[2]
            and "not a JSON object" in texts[3]
            and "not a JSON object" in texts[4]
        )
        assert [item["error"]["content"] for item in failed[:4]] == texts[:4]
        assert server.messages()[-2]["calls"] == [("python", {"invalid": "[]"})]
        events = server.create(stream=True)
        assert [e["type"] for e in events].count("response.mcp_call.failed") == 4


def test_long_answers_of_tools_are_cut():
    with Server(FIND, ANSWER, options={"max_tool_output_chars": 7}) as server:
        server.create()
        assert (
            server.messages()[-1]["content"].startswith("browser\n(")
            and "characters more" in server.messages()[-1]["content"]
        )


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_beyond_the_limit_are_ignored(limit: int, stream: bool):
    """Ignored calls are not items and do not run, and the model is told so once. After that, the
    functions are removed from the request."""
    asked = [({"max_tool_calls": limit}, {})] if limit else []
    for fields, options in (*asked, ({"max_tool_calls": 9}, {"max_tool_calls": limit})):
        with Server(ADD, options=options) as server:
            answer = server.create(stream=stream, tools=[CALC, CLIENTS], **fields)
            response = answer[-1]["response"] if stream else answer
            assert kinds(response).count("mcp_call") == limit == len(server.tool.sessions[0].calls)
            assert response["status"] == "completed" and len(server.engine.requests) == limit + 2
            assert "not run" in server.messages()[-1]["content"]
            assert [tool["function"]["name"] for tool in server.tokenizer.chats[-1].tools] == [
                "mine"
            ]


def test_a_call_of_the_clients_ends_the_response():
    calls = ADD + "<call mine>{}</call>" + PYTHON
    with Server(calls, ANSWER) as server:
        for stream in (False, True):
            answer = server.create(stream=stream)
            response = answer[-1]["response"] if stream else answer
            assert kinds(response) == [
                "reasoning",
                "message",
                "mcp_call",
                "function_call",
                "code_interpreter_call",
            ]
            assert [item["status"] for item in response["output"]] == ["completed"] * 5
            assert response["status"] == "completed"
        mine = response["output"][3]
        result = {"type": "function_call_output", "call_id": mine["call_id"], "output": "7"}
        again = server.create([result], previous_response_id=response["id"])
        assert [message["role"] for message in server.messages()] == [
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
            "tool",
        ]
        assert server.messages()[1]["calls"] == [("calc_add", {"x": 1, "y": 2})]
        assert [name for name, _ in server.messages()[3]["calls"]] == ["mine", "python"]
        assert again["output"][-1]["content"][0]["text"] == "It is 3."


def test_a_stored_response_and_items_sent_back_go_on_alike():
    with Server(ADD + PYTHON, ANSWER) as server:
        first = server.create("1 + 2?")
        server.create("And now?", previous_response_id=first["id"])
        stored = server.messages()
        by_hand = [
            {"role": "user", "content": "1 + 2?"},
            *first["output"],
            {"role": "user", "content": "And now?"},
        ]
        server.create(by_hand, store=False)
        assert server.messages() == stored
        assert [message["content"] for message in stored if message["role"] == "tool"] == [
            "3",
            "python says 'print(1)\\n'",
        ]
        ids = [
            call["id"]
            for message in server.tokenizer.chats[-1].messages
            for call in message.get("tool_calls", ())
        ]
        answered = [
            m["tool_call_id"] for m in server.tokenizer.chats[-1].messages if m["role"] == "tool"
        ]
        assert ids == answered and len(set(ids)) == 2


def test_what_was_found_is_kept_but_no_part_of_the_item():
    with Server(FIND, ANSWER) as server:
        first = server.create()
        server.create("And?", previous_response_id=first["id"])
        assert "browser_search says 'é'" in [message["content"] for message in server.messages()]
        server.create(
            [
                {"role": "user", "content": "x"},
                *first["output"],
                {"role": "user", "content": "And?"},
            ]
        )
        assert server.messages()[1]["calls"] == [("browser_search", {"query": "é"})]
        assert "not sent back" in server.messages()[2]["content"]


def test_items_without_an_answer_and_lists_of_tools_stand_for_nothing():
    cut_off = {
        "type": "mcp_call",
        "id": "mcp_1",
        "server_label": "s",
        "name": "n",
        "arguments": '{"x"',
        "status": "incomplete",
    }
    failed = {
        "type": "mcp_call",
        "id": "mcp_2",
        "server_label": "s",
        "name": "n",
        "arguments": "{}",
        "error": {"type": "mcp_tool_execution_error", "content": "no"},
    }
    listed = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []}
    with Server("ok") as server:
        server.create([{"role": "user", "content": "a"}, listed, cut_off, failed])
        assert server.messages() == [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "calls": [("s_n", {})]},
            {"role": "tool", "content": "no"},
        ]


def test_hidden_reasoning_stays_in_the_conversation():
    with Server(ADD, ANSWER) as server:
        response = server.create(include_reasoning=False)
        assert "reasoning" not in kinds(response)
        assert server.messages()[1]["reasoning"] == "I add"


CALCS = ["calc_add", "calc_fail", "calc_crash", "calc_wait"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", [*CALCS, "python", "browser_search", "browser_open", "browser_find", "mine"]),
        ({"type": "mcp", "server_label": "calc"}, CALCS),
        ({"type": "mcp", "server_label": "calc", "name": "add"}, ["calc_add"]),
        ({"type": "code_interpreter"}, ["python"]),
    ],
)
def test_a_forced_call_is_forced_once(choice: Any, names: list[str]):
    calls = {"python": {"code": "1"}, "calc_add": {"x": 1, "y": 1}}
    name = "python" if names == ["python"] else "calc_add"
    with Server(
        json.dumps([{"name": name, "parameters": calls[name]}]), "Done.", parsers=False
    ) as server:
        response = server.create(tool_choice=choice)
        assert (
            kinds(response)[0].endswith("_call")
            and response["output"][1]["content"][0]["text"] == "Done."
        )
        first, second = (params for _, params, _ in server.engine.requests)
        schema = first.structured_outputs.json
        assert [
            name
            for name in [*CALCS, "python", "browser_search", "browser_open", "browser_find", "mine"]
            if f'"{name}"' in schema
        ] == names
        assert second.structured_outputs is None
        assert len(server.tokenizer.chats[0].tools) == 9, "the template shows all"


def test_the_limit_of_tokens_holds_for_all_turns():
    with Server(ADD, ANSWER) as server:
        response = server.create(max_output_tokens=len(ADD) + 1 + 20)
        assert response["status"] == "incomplete" and response["incomplete_details"] == {
            "reason": "max_output_tokens"
        }
        assert (
            response["usage"]["output_tokens"] == len(ADD) + 1 + 20
            and server.engine.requests[-1][1].max_tokens == 20
        )
        response = server.create(max_output_tokens=len(ADD) + 1)
        assert (response["status"], kinds(response)[-1], len(server.engine.requests)) == (
            "incomplete",
            "mcp_call",
            3,
        )
        assert response["output"][-1]["output"] == "3"


def test_a_call_that_is_cut_off_does_not_run():
    for limit in (len(ADD) - 10, len(ADD)):
        with Server(ADD, ANSWER) as server:
            for stream in (False, True):
                answer = server.create(max_output_tokens=limit, stream=stream)
                response = answer[-1]["response"] if stream else answer
                call = response["output"][-1]
                assert (response["status"], call["type"], call["status"]) == (
                    "incomplete",
                    "mcp_call",
                    "incomplete",
                )
                assert server.tool.sessions[-1].calls == []
            follow = server.create(
                "go on", previous_response_id=response["id"], max_output_tokens=1
            )
            assert follow["status"] == "incomplete"


def test_a_conversation_that_grows_too_long_fails_and_keeps_its_items(
    monkeypatch: pytest.MonkeyPatch,
):
    async def run(session: Any, name: str, arguments: Any) -> ToolOutput:
        return ToolOutput("x" * 5000)

    monkeypatch.setattr(FakeToolSession, "run", run)
    with Server(FIND, ANSWER) as server:
        response = server.create()
        assert (response["status"], response["error"]["code"]) == ("failed", "invalid_prompt")
        assert kinds(response) == ["web_search_call"]
        events = server.create(stream=True)
        assert events[-1]["type"] == "response.failed" and kinds(events[-1]["response"]) == [
            "web_search_call"
        ]


def test_in_the_background_and_cancelled_while_a_tool_runs():
    with Server(ADD, ANSWER) as server:
        started = server.create(background=True)
        path = f"/v1/responses/{started['id']}"
        wait_for(lambda: server.client.get(path).json()["status"] == "completed", "the answer")
        assert kinds(server.client.get(path).json())[2] == "mcp_call"
        events = server.create(background=True, stream=True)
        assert plain(events[-1]["response"]["output"]) == plain(
            server.client.get(path).json()["output"]
        )
        server.create("And?", previous_response_id=started["id"])
        assert "tool" in [message["role"] for message in server.messages()]
    with Server(ADD + "<call calc_wait>{}</call>", ANSWER) as server:
        started = server.create(background=True)
        wait_for(lambda: server.tool.sessions and server.tool.sessions[0].calls, "the call")
        cancelled = server.client.post(f"/v1/responses/{started['id']}/cancel").json()
        assert cancelled["status"] == "cancelled"
        assert [item["status"] for item in cancelled["output"]] == [
            "completed",
            "completed",
            "completed",
            "incomplete",
        ]
        assert server.tool.sessions[0].num_cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_tool(stream: bool):
    tool = FakeBuiltinTool()
    engine = FakeEngineClient("<call calc_wait>{}</call>", tool_parser=FakeToolParser)
    with serving(apis, engine, {"mcp": [tool]}) as address:
        with posted(address, "/v1/responses", {"input": "x", "tools": [CALC], "stream": stream}):
            wait_for(lambda: engine.requests and not engine.running, "the call")
        wait_for(lambda: tool.sessions[0].num_closed == 1, "the end of the session")
    assert tool.sessions[0].num_cancelled == 1 and len(engine.requests) == 1


def test_the_official_client():
    engine = FakeEngineClient(
        lambda prompt, index: ANSWER if "tool: " in prompt else ADD + PYTHON + FIND,
        tool_parser=FakeToolParser,
        reasoning_parser=FakeReasoningParser,
    )
    tool = FakeBuiltinTool()
    tools: Any = [CALC, {"type": "web_search"}, {"type": "code_interpreter"}]
    with (
        serving(apis, engine, {kind: [tool] for kind in TYPES}) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
    ):
        whole = client.responses.create(model="fake-model", input="1 + 2?", tools=tools)
        with client.responses.stream(model="fake-model", input="1 + 2?", tools=tools) as stream:
            events = list(stream)
        final = stream.get_final_response()
        follow = client.responses.create(
            model="fake-model", input=[*whole.output, {"role": "user", "content": "?"}]
        )  # type: ignore[list-item]
    assert (
        [item.type for item in whole.output]
        == [item.type for item in final.output]
        == [
            "reasoning",
            "message",
            "mcp_call",
            "code_interpreter_call",
            "web_search_call",
            "reasoning",
            "message",
        ]
    )
    assert whole.output_text.endswith("It is 3.") and final.output_text == whole.output_text
    assert {"response.mcp_call.completed", "response.web_search_call.searching"} <= {
        event.type for event in events
    }
    assert follow.status == "completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [CLIENTS, {"type": "file_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "mcp", "server_label": "elsewhere"}]}, "tools[0].type"),
        ({"tools": [{**CALC, "server_url": "http://evil"}]}, "tools[0].server_url"),
        ({"tools": [CALC, CALC]}, "tools[1]"),
        ({"tools": [CODE, {**CLIENTS, "name": "python"}]}, "tools[1].name"),
        ({"tools": [CALC], "tool_choice": {"type": "code_interpreter"}}, "tool_choice"),
        ({"tools": [CALC], "tool_choice": {"type": "mcp", "server_label": "other"}}, "tool_choice"),
        (
            {"input": [{"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}"}]},
            "input[0].server_label",
        ),
        ({"input": [{"type": "code_interpreter_call", "id": "m", "code": 3}]}, "input[0].code"),
        (
            {"input": [{"type": "web_search_call", "id": "m", "action": "search"}]},
            "input[0].action",
        ),
        ({"input": [{"type": "mcp_approval_response"}]}, "input[0].type"),
    ],
)
def test_refusals_name_the_field(fields: Any, param: str):
    with Server("x") as server:
        error = server.create(status=400, **fields)["error"]
        assert error["param"] == param, error
        assert server.engine.requests == []
        server.tool.sessions.clear()  # refused before anything was run


def test_without_a_parser_built_in_tools_must_be_forced():
    with Server("x", parsers=False) as server:
        error = server.create(status=400)["error"]
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
        server.tool.sessions.clear()
        assert server.create(tool_choice="none")["output"][0]["content"][0]["text"] == "x"
