"""SamplingParams and related classes: how a request wants its output to be generated.

Field names, defaults, ranges and normalisation are vLLM's. The class crosses the process boundary
as it is (msgspec). `check_against_model` does the checks that need the model (vocabulary size,
`max_logprobs`).
"""

from __future__ import annotations

import json as json_module
import re
import sys
from enum import IntEnum
from functools import cache
from numbers import Real
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pegboard.errors import RequestError, brief
from pegboard.log import get_logger

log = get_logger(__name__)

NUM_DRAFTS = "num_speculative_tokens"
"""The key in `SamplingParams.extra_args` that says how many drafts a request gets at most; 0 = it
gets none."""
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 1e-2
CONSTRAINT_KINDS: tuple[Any, ...] = (
    "json",
    "regex",
    "choice",
    "grammar",
    "json_object",
    "structural_tag",
)
"""The fields of StructuredOutputsParams of which exactly one is set."""
MAX_JSON_DEPTH = 100
"""Maximum nesting depth of a JSON schema or structural tag."""
MAX_CONSTRAINT_CHARACTERS = 256 * 1024
"""Maximum length of a constraint, as text. Backends have lower limits on what is in it."""


BOUNDS = {" >= ": " at least ", " <= ": " at most ", " > ": " above "}
"""A sign in an error of msgspec → what our error says."""
MAX_INT = 2**63 - 1
MAX_FLOAT = sys.float_info.max
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]
CountOrAll = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class RequestOutputKind(IntEnum):
    """What the outputs of a stream contain: everything so far, only the new part, or one final
    output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Force the output into a shape: exactly one of json, regex, choice, grammar, json_object,
    structural_tag.

    json is a JSON schema as text or as a dict, which becomes text. structural_tag is JSON text.
    grammar: EBNF or Lark. Raises RequestError naming the field.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    # Set by the front, never by users, when the output begins with reasoning: the token ids of the
    # texts that end reasoning. The constraint applies after the first of them. None: the front has
    # not looked for them yet.
    reasoning_end_token_ids: list[list[int]] | None = None
    # Set by the front, never by users: the field of the request that asked for the constraint.
    # Errors name it.
    parameter: str = "structured_outputs"

    def __post_init__(self) -> None:
        constraints = [name for name in CONSTRAINT_KINDS if getattr(self, name) is not None]
        if len(constraints) != 1:
            raise RequestError(
                (
                    f"{self.parameter}: expected exactly one of {', '.join(CONSTRAINT_KINDS)}; "
                    f"got {', '.join(constraints) or 'none'}"
                ),
                parameter=self.parameter,
            )
        name = constraints[0]
        reason = self._wrong(name, getattr(self, name))
        if reason is None and not isinstance(self.whitespace_pattern, str | None):
            name = "whitespace_pattern"
            reason = f"must be text, got {brief(self.whitespace_pattern, 200)}"
        if reason is not None:
            field = (
                f"{self.parameter}.{name}"
                if self.parameter == "structured_outputs"
                else self.parameter
            )
            raise RequestError(f"{field} {reason}", parameter=self.parameter)
        # text need not be checked again, and it carries integers of any size to the engine
        if isinstance(self.json, dict):
            self.json = json_module.dumps(self.json)

    def _wrong(self, name: str, value: Any) -> str | None:
        """Return why the constraint is wrong for every backend, or None."""
        if name == "choice":
            if (
                not isinstance(value, list)
                or not value
                or not all(isinstance(item, str) for item in value)
            ):
                return f"must be a list of strings and not empty, got {brief(value, 200)}"
            return _bad_text("".join(value), 4 * len(value))
        if name == "json_object":
            return None if value is True else f"must be true, got {brief(value, 200)}"
        if name == "json" and isinstance(value, dict):
            try:
                text = json_module.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                return f"is not JSON: {error}"
            return _bad_text(text) or _too_deep(value)
        if not isinstance(value, str):
            return f"must be text, got {brief(value, 200)}"
        if (reason := _bad_text(value)) is not None:
            return reason
        if name not in ("json", "structural_tag"):
            return None if value.strip() else "must not be empty"
        try:
            parsed = json_module.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            return f"is not JSON: {error}"
        wanted = (dict, bool) if name == "json" else (dict,)
        return (
            _too_deep(parsed)
            if isinstance(parsed, wanted)
            else f"must be a JSON object, got {brief(parsed, 200)}"
        )


def _bad_text(text: str, num_more: int = 0) -> str | None:
    """Refuse a constraint that is too long, or that is not text. num_more: what its form as JSON
    adds."""
    if (length := len(text) + num_more) > MAX_CONSTRAINT_CHARACTERS:
        return f"has {length} characters; at most {MAX_CONSTRAINT_CHARACTERS} are accepted"
    return (
        "contains half of a surrogate pair, which is not text"
        if any("\ud800" <= c <= "\udfff" for c in text)
        else None
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def _too_deep(value: Any) -> str | None:
    """Refuse a schema that is nested too deeply, because backends walk schemas recursively. value:
    a dict; true and false are also schemas."""
    if isinstance(value, bool):
        return None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner = [
            part for item in level for part in (item.values() if isinstance(item, dict) else item)
        ]
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return None
    return f"is nested deeper than {MAX_JSON_DEPTH} levels"


class SamplingParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, dict=False
):
    """How to generate the output of one request.

    n: completions to return. temperature 0 is greedy. top_k 0 or -1 considers all tokens.
    `logprobs`/`prompt_logprobs` k returns the k most likely tokens in addition to the chosen one,
    -1 the whole vocabulary. `max_tokens` None runs to `max_model_len`. Lengths are in tokens.
    Raises `RequestError`, which names the field, if a value is out of range."""

    n: Count = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_FLOAT)] = 1.0
    temperature: Annotated[float, Meta(ge=0, le=MAX_FLOAT)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: CountOrAll = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=MAX_INT)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: Count | None = 16
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    logprobs: CountOrAll | None = None
    prompt_logprobs: CountOrAll | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: CountOrAll | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    # Set by the front (`front/prompts.py`) before the request reaches the engine, never by users.
    eos_token_ids: list[TokenId] = []
    bad_words_token_ids: list[list[TokenId]] = []

    def __post_init__(self) -> None:
        self._normalise()
        self._validate()
        if self.is_greedy:
            self.top_p = 1.0
            self.top_k = 0
            self.min_p = 0.0

    def _normalise(self) -> None:
        if isinstance(self.temperature, int | float) and 0 < self.temperature < MIN_TEMPERATURE:
            log.warning(
                "temperature %s is below %s and is raised to it", self.temperature, MIN_TEMPERATURE
            )
            self.temperature = MIN_TEMPERATURE
        if self.seed == -1:
            self.seed = None
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        self.stop_token_ids = self.stop_token_ids or []
        self.bad_words = self.bad_words or []
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        if isinstance(self.logit_bias, dict):  # also with numbers of numpy
            self.logit_bias = {
                token: float(bias) if isinstance(bias, Real) and type(bias) is not bool else bias
                for token, bias in self.logit_bias.items()
            }
        elif self.logit_bias is not None:
            _fail(self, "logit_bias", "must be a dict from token ids to numbers")
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _validate(self) -> None:
        _check_types(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail(self, "min_tokens", f"must be at most max_tokens={self.max_tokens}")
        for name in ("stop", "bad_words"):
            if "" in getattr(self, name):
                _fail(self, name, "must not contain an empty string")
        if self.stop and not self.detokenize:
            _fail(self, "stop", "needs detokenize=True: stop strings are found in the text")
        if self.is_greedy and self.n > 1:
            _fail(
                self,
                "n",
                "must be 1 with temperature 0 (greedy): all completions would be the same",
            )
        if self.truncate_prompt_tokens == 0:
            _fail(self, "truncate_prompt_tokens", "must be at least 1, or -1 for max_model_len")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _fail(self, "allowed_token_ids", "must not be empty")
        most = self.most_drafts
        if most is not None and (type(most) is not int or most < 0):
            _fail(self, "extra_args", f"must have an integer of at least 0 as {NUM_DRAFTS}")

    @property
    def most_drafts(self) -> int | None:
        """How many draft tokens a step verifies at most; None = the request does not say."""
        return (self.extra_args or {}).get(NUM_DRAFTS)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen at every position."""
        return self.temperature < GREEDY_BELOW

    @property
    def all_stop_token_ids(self) -> set[int]:
        """The token ids that end the output: the request's own, and those of end of sequence unless
        the request ignores them."""
        token_ids = set(self.stop_token_ids or ())
        return token_ids if self.ignore_eos else token_ids | set(self.eos_token_ids)

    @property
    def text_hold_back(self) -> int:
        """How many characters at the end of a stream may still become part of a stop string."""
        if not self.stop or self.include_stop_str_in_output:
            return 0
        return max(len(text) for text in self.stop) - 1

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return a copy with `changes`, validated again."""
        return msgspec.structs.replace(self, **changes)

    def check_against_model(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Raise `RequestError` if the model cannot serve these parameters: ids outside the
        vocabulary, or too many logprobs."""
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            wanted = vocab_size if count == -1 else count
            if wanted is not None and 0 <= max_logprobs < wanted:
                _fail(
                    self,
                    name,
                    f"is over the limit of {max_logprobs} (raise --max-logprobs to allow it)",
                )
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            outside = [token for token in getattr(self, name) or () if not 0 <= token < vocab_size]
            if outside:
                _fail(self, name, f"has ids outside the vocabulary of {vocab_size}: {outside[:5]}")


def _fail(params: Any, name: str, expected: str) -> None:
    raise RequestError(
        f"{name} {expected}, got {brief(getattr(params, name), 200)}", parameter=name
    )


def _check_types(params: Any) -> None:
    """Convert all fields to their types, for example a tuple to a list. A value of a wrong type or
    out of range is refused here. The engine would also find it, but could no longer tell which
    request it came from."""
    try:
        typed = msgspec.convert(params, _types_of(params.__class__), from_attributes=True)
    except msgspec.ValidationError as error:
        expected, _, path = str(error).partition(" - at ")
        name = re.findall(r"\$\.(\w+)", path)[0]
        value = getattr(params, name)
        if not isinstance(value, float) or type(value) is float:
            wrong = "type" if ", got" in expected else "value"
            for sign, words in BOUNDS.items():
                expected = expected.replace(sign, words)
            _fail(params, name, f"has a wrong {wrong}: {expected[0].lower()}{expected[1:]}")
        # numpy's subclass of float is accepted, but msgspec does not know it
        setattr(params, name, float(value))
        _check_types(params)
    else:
        for name in typed.__struct_fields__:
            setattr(params, name, getattr(typed, name))


@cache
def _types_of(params: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct with the same fields, and without checks of its own."""
    return msgspec.defstruct(
        "Types", [(field.name, field.type) for field in msgspec.structs.fields(params)]
    )


class BeamSearchParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of beam search. The score is cumulative logprob / length ** length_penalty. Raises
    `RequestError`, which names the field, if a value is out of range."""

    beam_width: Count
    max_tokens: Count
    ignore_eos: bool = False
    temperature: Annotated[float, Meta(ge=0, le=MAX_FLOAT)] = 0.0
    # length ** 32 is a float for every length
    length_penalty: Annotated[float, Meta(ge=-32, le=32)] = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
