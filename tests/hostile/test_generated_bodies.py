"""Generated bodies for every route. None is answered with 500, and each is answered with little
work."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pooled_routes
import pytest
from hostile_routes import (
    CHAT,
    COMPLETION,
    COUNT,
    DETOKENIZE,
    HEADERS,
    MESSAGES,
    RESPONSES,
    SMALL,
    TOKENIZE,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pegboard_api_anthropic.fields import CountTokensRequest, MessagesRequest
from pegboard_api_openai.fields import ChatRequest, CompletionRequest
from pegboard_api_openai.tokenize import DetokenizeRequest, TokenizeRequest
from pegboard_api_pooling.fields import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from pegboard_api_responses.fields import ResponsesRequest

MODELS: dict[str, Any] = {
    CHAT: ChatRequest,
    COMPLETION: CompletionRequest,
    RESPONSES: ResponsesRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
    MESSAGES: MessagesRequest,
    COUNT: CountTokensRequest,
    pooled_routes.EMBEDDINGS: EmbeddingRequest,
    pooled_routes.POOLING: PoolingRequest,
    pooled_routes.CLASSIFY: ClassifyRequest,
    pooled_routes.SCORE: ScoreRequest,
    pooled_routes.RERANK: RerankRequest,
}
BODIES = {**SMALL, **pooled_routes.SMALL}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": {"items": [value]}}
    return value


WORDS = [
    "user",
    "assistant",
    "tool",
    "function",
    "role",
    "content",
    "type",
    "text",
    "name",
    "arguments",
    "parameters",
    "json",
    "regex",
    "json_schema",
    "schema",
    "message",
    "function_call",
    "reasoning",
    "input_text",
    "tool_use",
    "tool_result",
    "auto",
    "required",
    "format",
    "call_id",
    "id",
    "input",
    "input_schema",
    "system",
    "object",
    "{",
    '{"a": ' * 300 + "1" + "}" * 300,
    "extra",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, -(2**31) - 1, 2**63, 10**40, 10**300, 1e308, 0.5]),
    st.sampled_from(WORDS),
    st.text(max_size=5),
)
NAMES = st.sampled_from(WORDS) | st.text(max_size=3)
VALUES = st.one_of(
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=5)
        ),
        max_leaves=12,
    ),
    st.integers(1, 60).map(nested),
    st.sampled_from([300, 20_000]).flatmap(lambda num: SCALARS.map(lambda item: [item] * num)),
    st.just({str(number): 1 for number in range(20_000)}),
)


class Sent(bytes):
    """A body. Reports show its beginning only."""

    def __repr__(self) -> str:
        return repr(bytes(self[:600]))


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Sent:
    """A valid body with some fields, or parts of fields, replaced."""
    body = json.loads(json.dumps(BODIES[path]))
    names = sorted(MODELS[path].model_fields)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        body[name] = draw(VALUES)
    if isinstance(body.get("messages"), list) and draw(st.booleans()):
        body["messages"].append(
            {"role": draw(st.sampled_from(WORDS[:4])), draw(st.sampled_from(WORDS)): draw(VALUES)}
        )
    return Sent(json.dumps(body).encode())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_answered_with_500(make_hostile, path):
    hostile = make_hostile(pooled_routes.engine_of(path))

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(bodies(path))
    def check(content: Sent) -> None:
        async def post(http: httpx.AsyncClient) -> None:
            answer = await http.post(path, content=content, headers=HEADERS)
            assert answer.status_code in (200, 400, 404, 413), (answer.text[:300], content)
            if answer.headers["content-type"] == "application/json":
                assert (
                    answer.status_code == 200 or 0 < len(answer.json()["error"]["message"]) <= 2000
                )

        hostile.tokenizer.num_chars = 0
        hostile.run(post)
        assert hostile.tokenizer.num_chars <= 40 * len(content) + 50_000, (
            "more text was tokenized than the body has"
        )

    check()


def test_a_template_of_a_request_cannot_hold_up_others(make_hostile):
    """The template runs in a process of its own; the next chat is answered."""
    hostile = make_hostile(trust_request_chat_template=True)
    bad = [
        "{{ 10 ** 5000 }}",
        "{{ 'a' * 10 ** 10 }}",
        "{% for m in messages %}{{ m.content * 10 ** 7 }}{% endfor %}",
        "{% for %}",
    ]

    async def post(http: httpx.AsyncClient) -> None:
        for source in bad:
            answer = await http.post(CHAT, json={**SMALL[CHAT], "chat_template": source})
            assert answer.status_code == 400 and answer.json()["error"]["param"] in (
                "messages",
                "chat_template",
            ), answer.text
        answer = await http.post(
            CHAT, json={**SMALL[CHAT], "chat_template": "{{ messages[0].content }}"}
        )
        assert answer.status_code == 200

    hostile.run(post)
    assert hostile.tokenizer.num_chars < 100, "only the good template has text"
