"""What chat templates can do, and the errors of wrong templates and wrong chats. The tests of the
tokenizer plugin for transformers' files compare the results with transformers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.media import take_media
from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.tokenizer import Chat
from pegboard_chat import ChatTemplate, named_templates

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
PLAIN = "{% for m in messages %}{{ m.content }}|{% endfor %}"
PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}{{ p.type }}={{ p.text }}|{% endfor %}{% "
    "endfor %}"
)


def _render(source, messages=USER, **more) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(Chat(messages=messages, **more))


def test_language_extensions():
    source = (
        "{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}{% "
        "generation %}g{% endgeneration %}{{ {'b': '<ä>', 'a': 1} | tojson }}{{ bos_token }}{{ "
        "strftime_now('%%') }}"
    )
    assert _render(source) == '13g{"b": "<ä>", "a": 1}<s>%'


def test_named_templates_are_chosen():
    sources = {"default": "d", "tool_use": "t", "rag": "r"}
    assert _render(sources) == "d"
    assert _render(sources, tools=TOOLS) == "t"
    assert _render(sources, chat_template="rag") == "r"
    assert _render(sources, chat_template="{{ bos_token }}own") == "<s>own"
    with pytest.raises(RequestError, match="chat templates rag, x and no default"):
        _render({"rag": "r", "x": "y"})
    assert named_templates([{"name": "default", "template": "d"}]) == {"default": "d"}
    with pytest.raises(ModelError, match="expected Jinja source"):
        named_templates([{"name": "default"}])


@pytest.mark.parametrize(
    ("source", "parameter", "message"),
    [
        (None, "messages", "--chat-template"),
        ("{{ raise_exception('roles must alternate') }}", "messages", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "messages", "TypeError"),
        ("{{ messages.missing.deeper }}", "messages", "no attribute 'missing'"),
        ("{% for %}", "chat_template", "line 1"),
        ("{{ ''.__class__.__mro__ }}", "messages", "unsafe"),
        ("{{ messages.append(1) }}", "messages", "append.*unsafe"),
    ],
)
def test_failures_are_request_errors(source, parameter, message):
    with pytest.raises(RequestError, match=message) as caught:
        _render(source)
    assert caught.value.parameter == parameter


@given(st.lists(st.text(max_size=5), min_size=1, max_size=4))
def test_content_takes_the_form_the_template_reads(texts):
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]
    assert _render(PLAIN, parts) == "\n".join(texts) + "|"
    assert _render(PARTS, parts) == "".join(f"text={text}|" for text in texts)


@pytest.mark.parametrize(
    "source",
    [
        "{% set c = messages[0].content %}{% for p in c %}{{ p.text }}{% endfor %}",
        "{% for p in messages[0]['content'] | list %}{{ p.text }}{% endfor %}",
        (
            "{% macro show(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro "
            "%}{{ show(messages[0].content) }}"
        ),
    ],
)
def test_templates_that_only_know_parts_get_strings_as_parts(source):
    assert _render(source) == "hi"


def test_templates_that_know_both_get_what_was_sent():
    source = (
        "{% if messages[0].content is string %}s{% else %}{% for p in messages[0].content %}p{% "
        "endfor %}{% endif %}"
    )
    assert _render(source) == "s"
    assert (
        _render(source, [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]) == "pp"
    )


def test_splitting_a_string_is_no_walk_over_parts():
    source = "{% for line in messages[0].content.split(',') %}{{ line }};{% endfor %}"
    assert (
        _render(source, [{"role": "user", "content": [{"type": "text", "text": "a,b"}]}]) == "a;b;"
    )


@pytest.mark.parametrize(("placeholder", "expected"), [("<i>", "<i>\na|"), ("", "a|")])
def test_placeholders_come_before_the_text(placeholder, expected):
    """One without a text writes nothing."""
    parts = [{"type": "text", "text": "a"}, {"type": "image", "placeholder": placeholder}]
    assert _render(PLAIN, [{"role": "user", "content": parts}]) == expected


def test_placeholders_stay_between_the_texts():
    """With interleave_mm_strings."""
    image = {"type": "image_url", "image_url": {"url": "x"}}
    texts = [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]
    messages, _ = take_media(
        [{"role": "user", "content": texts}], {"image": "<i>"}, interleaves=True
    )
    assert _render(PLAIN, messages) == "a\n<i>\nb|"


def test_media_for_a_text_template_is_refused():
    with pytest.raises(RequestError, match="takes text only, got a part of type 'image_url'"):
        _render(
            PLAIN, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        )


def test_tool_arguments_become_objects_and_messages_stay_untouched():
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert _render("{{ messages[0].tool_calls[0].function.arguments.x }}", [message]) == "1"
    assert call["function"]["arguments"] == '{"x": 1}'
    call["function"]["arguments"] = "{"
    with pytest.raises(RequestError, match="tool call 'f' are not valid JSON"):
        _render(PLAIN, [message])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_every_name(name):
    message = [{"role": "assistant", "content": "", name: "why"}]
    assert (
        _render("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", message)
        == "whywhy"
    )


def test_text_joins_the_reasoning_where_a_template_refuses_both_beside_a_call():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    chat = [
        {"role": "assistant", "reasoning": "why", "content": "so", "tool_calls": [call]},
        {"role": "assistant", "content": "!"},
    ]
    said = (
        "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.content }}|{% "
        "endfor %}"
    )
    refuses = (
        "{% for m in messages if m.tool_calls and m.content and m.thinking %}{{ "
        "raise_exception('no') }}{% endfor %}"
    )
    assert _render(said, chat) == "why|why|so|||!|"
    assert _render(refuses + said, chat) == "why\n\nso|why\n\nso||||!|"
    with pytest.raises(RequestError, match="never"):
        _render("{{ raise_exception('never') }}", chat)
    with pytest.raises(RequestError, match="no"):
        _render("{{ raise_exception('no') }}", USER)


def test_template_kwargs_reach_the_template_but_not_its_own_variables():
    assert (
        _render(
            "{{ enable_thinking }}{{ bos_token }}",
            template_kwargs={"enable_thinking": False, "bos_token": "B"},
        )
        == "FalseB"
    )
    with pytest.raises(RequestError, match="cannot set messages"):
        _render(PLAIN, template_kwargs={"messages": []})


def test_continuing_the_final_message():
    source = "{% for m in messages %}[{{ m.content }}]</end>{% endfor %}"
    more = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [*USER, {"role": "assistant", "content": "so far "}]
    assert _render(source, messages, **more) == "[hi]</end>[so far "
    assert (
        _render(source.replace("m.content", "m.content | trim"), messages, **more)
        == "[hi]</end>[so far"
    )
    with pytest.raises(RequestError, match="drops or changes"):
        _render("x", messages, **more)
    with pytest.raises(RequestError, match="no text to continue"):
        _render(source, [{"role": "assistant", "content": None}], **more)


def test_documents_need_a_place():
    documents = [{"title": "t", "text": "x"}]
    with pytest.raises(RequestError, match="no place for documents") as caught:
        _render(PLAIN, documents=documents)
    assert caught.value.parameter == "documents" and _render(PLAIN, documents=[]) == "hi|"
    assert _render("{% for d in documents %}{{ d.text }}{% endfor %}", documents=documents) == "x"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "-" * 3000 + "1 }}",
        "{% if a %}" * 2000,
    ],
)
def test_a_template_nested_too_deeply_is_an_error_of_the_template(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, {}).render(Chat(messages=[{"role": "user", "content": "x"}]))


# --- what the template has no place for -----------------------------------------------------------


def warnings_of(caplog, source, **fields):
    caplog.clear()
    ChatTemplate(source, {}).render(Chat(messages=[{"role": "user", "content": "x"}], **fields))
    return [record.getMessage() for record in caplog.records]


def test_what_the_template_does_not_read_is_told_once(caplog):
    tools = [{"type": "function", "function": {"name": "f"}}]
    source = "{# once #}{{ messages[0].content }}"
    told = warnings_of(caplog, source, tools=tools, template_kwargs={"colour": "red"})
    assert told == [
        (
            "the chat template of this model has no place for colour, tools, so the model does "
            "not see it"
        )
    ]
    assert warnings_of(caplog, source, tools=tools, template_kwargs={"colour": "blue"}) == []
    assert len(warnings_of(caplog, source, template_kwargs={"size": 1})) == 1
    reads = (
        "{{ messages[0].content }}{% if tools is defined and tools %}{{ tools | length }}{% endif "
        "%}{{ colour }}"
    )
    assert warnings_of(caplog, reads, tools=tools, template_kwargs={"colour": "red"}) == []


def test_an_effort_needs_one_of_its_two_names(caplog):
    effort = {"reasoning_effort": "low", "enable_thinking": True}
    assert (
        warnings_of(
            caplog, "{{ messages[0].content }}{{ enable_thinking }}", template_kwargs=effort
        )
        == []
    )
    assert (
        warnings_of(
            caplog, "{{ messages[0].content }}{{ reasoning_effort }}", template_kwargs=effort
        )
        == []
    )
    assert (
        "reasoning_effort"
        in warnings_of(caplog, "{# effort #}{{ messages[0].content }}", template_kwargs=effort)[0]
    )


def test_clients_cannot_fill_the_log(caplog):
    caplog.clear()
    template = ChatTemplate("{# flood #}{{ messages[0].content }}", {})
    for index in range(200):
        kwargs = {f"{'n' * 1000}{index}-{part}": 1 for part in range(20)}
        template.render(Chat(messages=[{"role": "user", "content": "x"}], template_kwargs=kwargs))
    assert (
        len(caplog.records) <= 32
        and sum(len(record.getMessage()) for record in caplog.records) < 20_000
    )
