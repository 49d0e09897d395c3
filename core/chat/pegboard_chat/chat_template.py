"""Chat templates: Jinja programs that come with models, rendered as the transformers library
renders them.

A template comes from a model or a user, so it runs in Jinja's sandbox and sees only plain data. A
server renders it in a process that has limits on time and memory.
Format: https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pegboard.errors import MalformedRequest, ModelError, RequestError
from pegboard.interfaces.tokenizer import Chat
from pegboard.log import get_logger
from pegboard_chat.request_limits import MAX_DEPTH, check_depth, too_long

if TYPE_CHECKING:
    from jinja2 import Template, nodes

    from pegboard_chat.limited_template import LimitedTemplates

_SCALARS = (str, bool, int, float)
log = get_logger(__name__)

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_EFFORT = ("reasoning_effort", "enable_thinking")
"""The template arguments that a reasoning effort sets. A template needs to read only one of
them."""
MAX_WARNINGS = 32
_HOW_TO_GIVE = "give one with --chat-template FILE"
# what an expression in a template can raise in addition to Jinja's own errors: "a" + 1, items[9], 1
# / 0, endless recursion
_EXPRESSION_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


def check_end(chat: Chat) -> None:
    """Raise RequestError if the chat both continues its last message and starts a new one. Every
    tokenizer checks this."""
    if chat.continue_final_message and chat.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true: an answer "
            "either continues the last message or starts a new one",
            parameter="continue_final_message",
        )


class ChatTemplate:
    """The template, or the named templates, of one model. It is thread-safe. Each source is
    compiled once per process.

    source: Jinja source, or name → source. None: the model has no template. Of several named
    templates, "default" is used, and "tool_use" for a chat with tools. special_tokens: variables of
    every template, such as {"bos_token": "<s>"}.
    """

    def __init__(
        self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]
    ) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat) -> str:
        """Return the text of the prompt. Raises RequestError if there is no template, if the
        template refuses the chat or fails on it, if the text is longer than `chat.max_chars`, or if
        `check_end` refuses the chat."""
        check_end(chat)
        source = self._choose(chat)
        is_given = source is chat.chat_template
        if chat.max_chars is None:
            text, unused = self.render_here(source, chat)
        else:  # a server: the template and the chat come from others
            given = {item.name: getattr(chat, item.name) for item in fields(chat)}
            templates = _limited(is_given=is_given)
            text, unused = templates.render(
                source, self._special_tokens, {**given, "chat_template": None}
            )
        if unused and not is_given:
            _warn_of_unused(source, unused)
        return text

    def render_here(self, source: str, chat: Chat) -> tuple[str, list[str]]:
        """Render in this process. Return the text, and what the chat has and the template does not
        read."""
        compiled = _compile(source)
        if clash := sorted(_RESERVED & chat.template_kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs cannot set {', '.join(clash)}",
                parameter="chat_template_kwargs",
            )
        if chat.documents and not compiled.has_documents:
            raise RequestError(
                "the model's chat template has no place for documents; write them in a message",
                parameter="documents",
            )
        unused = compiled.unused([*chat.template_kwargs, *(["tools"] if chat.tools else [])])
        messages = plain_messages(
            chat.messages, has_parts=compiled.has_parts, has_strings=compiled.has_strings
        )
        end = mark_end(messages) if chat.continue_final_message else None
        variables = self._special_tokens | plain_value(chat.template_kwargs)
        variables |= {
            "messages": messages,
            "tools": plain_value(chat.tools) if chat.tools else None,
            "documents": plain_value(chat.documents) if chat.documents else None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            text = compiled.render(variables, chat.max_chars)
        except RequestError:
            joined = text_in_reasoning(messages)
            if joined is None:
                raise
            text = compiled.render(variables | {"messages": joined}, chat.max_chars)
        return end.cut(text) if end else text, unused

    def _choose(self, chat: Chat) -> str:
        """Return the source for this chat: the chat's own, else the one for tools if the chat has
        tools, else the default."""
        if chat.chat_template is not None:
            return self._sources.get(chat.chat_template, chat.chat_template)
        if not self._sources:
            raise RequestError(
                f"this model has no chat template; {_HOW_TO_GIVE}, or send a prompt as plain text",
                parameter="messages",
            )
        if chat.tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" in self._sources:
            return self._sources["default"]
        names = ", ".join(sorted(self._sources))
        raise RequestError(
            f"the model has the chat templates {names} and no default; name one in chat_template",
            parameter="chat_template",
        )


class _Compiled:
    """A compiled template. has_parts: it loops over the parts of a message's content. has_strings:
    it also checks whether the content is a string. variables: the names that it reads."""

    def __init__(
        self, template: Template, *, has_parts: bool, has_strings: bool, variables: frozenset[str]
    ) -> None:
        self._template = template
        self._variables = variables
        self.has_documents = "documents" in variables
        self.has_parts = has_parts
        self.has_strings = has_strings

    def unused(self, names: Collection[str]) -> list[str]:
        """Return those of the names that the template does not read, each shortened. Clients choose
        the names."""
        unused = {name[:60] for name in names if name not in self._variables}
        if "reasoning_effort" in names and self._variables & set(_EFFORT):
            unused -= set(_EFFORT)
        return sorted(unused)[:MAX_WARNINGS]

    def render(self, variables: Mapping[str, Any], max_chars: int | None) -> str:
        from jinja2 import TemplateError

        parts = []
        num_chars = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                num_chars += len(part)
                if max_chars is not None and num_chars > max_chars:
                    break
        except TemplateError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", parameter="messages"
            ) from error
        except _EXPRESSION_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(
                f"the chat template fails on these messages: {reason}", parameter="messages"
            ) from error
        if max_chars is not None and num_chars > max_chars:
            raise too_long(num_chars, max_chars, "messages")
        return "".join(parts)


def answer_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text of a chat and what its template does not read, or the error. Called by
    `LimitedTemplates`."""
    try:
        text, unused = ChatTemplate(None, job["special_tokens"]).render_here(
            job["source"], Chat(**job["chat"])
        )
        return {"text": text, "unused": unused}
    except RequestError as error:
        return {
            "error": str(error)[:2000],
            "parameter": error.parameter,
            "is_malformed": isinstance(error, MalformedRequest),
        }


@lru_cache(maxsize=64)
def _compile(source: str) -> _Compiled:
    """Compile `source`. Raises RequestError if it is not valid Jinja."""
    try:
        from jinja2 import TemplateSyntaxError, nodes
    except ImportError as error:
        raise ModelError(
            "chat templates need jinja2, which is not installed: pip install 'jinja2>=3.1.6'"
        ) from error
    environment = _environment()
    try:
        tree = environment.parse(source)
        template = environment.from_string(source)
        tests = {test.name for test in tree.find_all(nodes.Test)}
        return _Compiled(
            template,
            has_parts=_iterates_over_content(tree),
            has_strings=bool(tests & {"string", "iterable", "sequence", "mapping"}),
            variables=frozenset(name.name for name in tree.find_all(nodes.Name)),
        )
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
        raise RequestError(
            f"the chat template is not valid Jinja: {reason}; {_HOW_TO_GIVE}",
            parameter="chat_template",
        ) from error
    except _EXPRESSION_ERRORS as error:  # Jinja computes constant expressions when it compiles
        reason = f"{type(error).__name__}: {error}"
        raise RequestError(
            f"the chat template cannot be compiled: {reason}; {_HOW_TO_GIVE}",
            parameter="chat_template",
        ) from error


def _warn_of_unused(source: str, names: Sequence[str]) -> None:
    """Say in the log, once for each name, that the template does not read it. The number of names
    is limited."""
    warned = _warned(source)
    shown = [name for name in names if name not in warned][:8]
    if shown and len(warned) < MAX_WARNINGS:
        warned.update(shown)
        message = ", ".join(shown)
        log.warning(
            "the chat template of this model has no place for %s, so the model does not see it",
            message,
        )


@lru_cache(maxsize=64)
def _warned(source: str) -> set[str]:
    return set()


@lru_cache(maxsize=2)
def _limited(*, is_given: bool) -> LimitedTemplates:
    """Return the process for templates of requests (is_given), or that for templates of models,
    which do not wait for those."""
    from pegboard_chat.limited_template import LimitedTemplates

    templates = LimitedTemplates(parameter="chat_template" if is_given else "messages")
    atexit.register(templates.close)
    return templates


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's text for training. It has no
        effect here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML and sorts keys. Models were not trained on
    such text."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _iterates_over_content(tree: nodes.Template) -> bool:
    """Return whether the template has a loop over a message's content (`for part in
    message.content`), even if the variables have other names."""
    from jinja2 import nodes

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):
            node = node.node
        match node:
            case nodes.Getattr(attr="content"):
                return True
            case nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Name(name=name):
                return name in names
        return False

    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if is_content(assignment.node) and isinstance(assignment.target, nodes.Name):
            names.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def named_templates(
    entries: str | Sequence[Mapping[str, str]] | None,
) -> str | dict[str, str] | None:
    """Convert `chat_template` of tokenizer_config.json, which is source or a list of {"name",
    "template"}, to the `source` of `ChatTemplate`. Raises ModelError for anything else."""
    if entries is None or isinstance(entries, str):
        return entries
    try:
        named = {entry["name"]: entry["template"] for entry in entries}
        if all(isinstance(text, str) for pair in named.items() for text in pair):
            return named
    except (TypeError, KeyError):
        pass
    raise ModelError(
        "chat_template in tokenizer_config.json: expected Jinja source or a list of name and "
        "template"
    )


_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def plain_value(value: Any, depth: int = 0) -> Any:
    """Return a deep copy of only dict, list, str, int, float, bool and None, so that a template has
    no other methods to misuse. Raises RequestError if `value` is nested deeper than `MAX_DEPTH`."""
    if value is None or isinstance(value, _SCALARS):
        return value
    if depth > MAX_DEPTH:
        raise RequestError(
            f"the chat is nested deeper than {MAX_DEPTH} levels; expected fewer",
            parameter="messages",
        )
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, depth + 1) for item in value]
    return f"<{type(value).__name__}>"


def plain_messages(
    messages: Sequence[Mapping[str, Any]], *, has_parts: bool, has_strings: bool
) -> list[dict[str, Any]]:
    """Return copies of `messages` for one template. has_parts: the template loops over content
    parts; if not, text parts are joined by line feeds. A template that knows only parts (has_parts
    and not has_strings) gets a string as one text part.
    """
    plain = []
    for message in messages:
        copy = plain_value(message)
        content = copy.get("content")
        if isinstance(content, list) and not has_parts:
            copy["content"] = _joined(content)
        elif isinstance(content, str) and has_parts and not has_strings:
            copy["content"] = [{"type": "text", "text": content}]
        for call in copy.get("tool_calls") or ():
            _parse_arguments(call)
        reasoning = next(
            (copy[field] for field in _REASONING_FIELDS if copy.get(field) is not None), None
        )
        if reasoning is not None:  # clients and templates use different names
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        plain.append(copy)
    return plain


def text_in_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return `messages` with text between reasoning and calls moved to the end of the reasoning.
    None: no message has such text. Some templates, such as gpt-oss's, refuse a message with all
    three, although the model does write all three."""
    has_text = False
    joined = []
    for message in messages:
        text = message.get("content")
        reasoning = message.get("thinking")
        if (
            message.get("tool_calls")
            and isinstance(text, str)
            and text
            and isinstance(reasoning, str)
            and reasoning
        ):
            has_text = True
            both = f"{reasoning}\n\n{text}"
            message = {
                **message,
                "content": "",
                **{name: both for name in _REASONING_FIELDS if name in message},
            }
        joined.append(dict(message))
    return joined if has_text else None


def _joined(parts: list[Any]) -> str:
    """Return the text of all parts. What stands for images, audio and video comes first, unless it
    is interleaved."""
    items = []
    texts = []
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("placeholder"), str):
            place = texts if part.get("interleaved") else items
            place += [part["placeholder"]] if part["placeholder"] else []
            continue
        text = (
            part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        )
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"the chat template of this model takes text only, got a part of type {kind!r}",
                parameter="messages",
            )
        texts.append(text)
    return "\n".join(items + texts)


def _parse_arguments(call: Any) -> None:
    """Convert the arguments of calls to objects. OpenAI's form is a JSON string, but templates
    print an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return
    try:
        function["arguments"] = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        name = function.get("name")
        raise RequestError(
            f"arguments of the tool call {name!r} are not valid JSON: {error}", parameter="messages"
        ) from error
    check_depth(function["arguments"], "messages")


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """Finds in the rendered text where the last message's content ended."""

    content: str

    def cut(self, text: str) -> str:
        """Return `text` up to the end of that content. Raises RequestError if the template changed
        or dropped the content."""
        mark = _END_MARK.strip()
        if self.content.strip() not in text or mark not in text:
            raise RequestError(
                (
                    "continue_final_message: the chat template drops or changes the last message, "
                    "so it cannot be continued"
                ),
                parameter="continue_final_message",
            )
        place = text.rindex(mark)
        is_untrimmed = text.startswith(_END_MARK, place)
        return text[:place] if is_untrimmed else text[:place].rstrip()


def mark_end(messages: list[dict[str, Any]]) -> MessageEnd:
    """Append a mark to the last text of the last message, in place. The mark ends with a space. If
    a template trims that space, it also trims spaces at the end of the content."""
    holder: dict[str, Any] | None = messages[-1] if messages else None
    field = "content"
    if holder is not None and isinstance(holder.get("content"), list):
        parts = [
            part
            for part in holder["content"]
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        holder = parts[-1] if parts else None
        field = "text"
    if holder is None or not isinstance(holder.get(field), str):
        raise RequestError(
            "continue_final_message: the last message has no text to continue",
            parameter="continue_final_message",
        )
    content = holder[field]
    holder[field] = content + _END_MARK
    return MessageEnd(content)
