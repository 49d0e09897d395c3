"""From the fields of a body to a conversation, and how the answer to it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.tokenizer import Chat
from pegboard_api_openai.fields import ChatRequest, TemplateFields
from pegboard_chat import chats
from pegboard_chat.openai_format import read_messages, read_tools, template_kwargs
from pegboard_chat.request_body import wrong


def read_chat(request: TemplateFields, tools: Sequence[Mapping[str, Any]] | None) -> Chat:
    """The conversation as the template gets it. Raises RequestError naming the field at fault."""
    generation_prompt = request.add_generation_prompt
    return Chat(
        messages=read_messages(request.messages),
        tools=tools,
        documents=request.documents,
        add_generation_prompt=not request.continue_final_message if generation_prompt is None else generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        template_kwargs=template_kwargs(request.chat_template_kwargs, getattr(request, "reasoning_effort", None)),
        add_special_tokens=bool(request.add_special_tokens),
    )


def read_request(request: ChatRequest) -> chats.ChatRequest:
    """The conversation of a chat completion. Raises RequestError naming the field at fault."""
    tools = read_tools(request.tools)
    choice: Any = request.tool_choice
    name: str | None = None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise wrong("tool_choice", "none, auto, required or {'type': 'function', 'function': {'name': …}}", choice)
        choice = "named"
    elif choice not in (None, "none", "auto", "required"):
        raise wrong("tool_choice", "none, auto, required or a named tool", choice)
    return chats.ChatRequest(
        chat=read_chat(request, tools),
        tool_choice=choice,
        function=name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        cache_salt=request.cache_salt,
    )
