"""From the fields of a conversation to the token ids of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyio import to_thread

from pegboard.errors import RequestError
from pegboard.interfaces.tokenizer import Chat, Tokenizer
from pegboard_api_openai.fields import TemplateFields
from pegboard_api_openai.messages import read_messages

# Template arguments with a field of their own, or that would change what rendering returns.
RESERVED_KWARGS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)


def read_chat(request: TemplateFields, tools: Sequence[Mapping[str, Any]] | None, settings: Mapping[str, Any]) -> Chat:
    """The conversation as the template gets it. Raises RequestError naming the field at fault."""
    generation_prompt = request.add_generation_prompt
    if generation_prompt and request.continue_final_message:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true: an answer either continues the last "
            "message or starts a new one",
            parameter="continue_final_message",
        )
    if request.chat_template is not None and not settings.get("trust_request_chat_template"):
        raise RequestError(
            "chat_template is not accepted in requests; the server allows it with --trust-request-chat-template",
            parameter="chat_template",
        )
    check_template_kwargs(request.chat_template_kwargs)
    return Chat(
        messages=read_messages(request.messages),
        tools=tools,
        documents=request.documents,
        add_generation_prompt=not request.continue_final_message if generation_prompt is None else generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        template_kwargs=template_kwargs(request.chat_template_kwargs, getattr(request, "reasoning_effort", None)),
    )


def check_template_kwargs(given: Mapping[str, Any]) -> None:
    """Raise RequestError for a template argument that has a field of its own."""
    taken = next((name for name in RESERVED_KWARGS if name in given), None)
    if taken is not None:
        raise RequestError(f"chat_template_kwargs must not hold {taken!r}", parameter="chat_template_kwargs")


def template_kwargs(given: Mapping[str, Any], reasoning_effort: str | None) -> dict[str, Any]:
    """The switches of the chat template. An effort is handed on, and is thinking or not for templates that know only that."""
    if reasoning_effort is None:
        return dict(given)
    return {"reasoning_effort": reasoning_effort, "enable_thinking": reasoning_effort != "none", **given}


async def render(tokenizer: Tokenizer, chat: Chat, *, add_special_tokens: bool) -> Sequence[int]:
    """Token ids of the rendered conversation; rendering and encoding run in a thread."""

    def work() -> Sequence[int]:
        rendered = tokenizer.render(chat)
        if rendered.token_ids is not None:
            return rendered.token_ids
        return tokenizer.encode(rendered.text or "", add_special_tokens=add_special_tokens)

    return await to_thread.run_sync(work)
