"""Contract tests of the kind `structured_output`. A plugin's test file:

    class TestMyBackend(StructuredOutputContract):
        kinds = ("json", "json_object", "regex", "choice")

        def backend(self, setup: StructuredOutputSetup) -> StructuredOutput:
            return MyBackend(None, setup)

A backend must enforce every constraint that it accepts. To test this, texts are drawn at random
from its masks and checked by `jsonschema`, by `re`, or against the list of choices. It may refuse
any constraint (by `reject`, or by a RequestError when compiling) except those in `takes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings

from pegboard.errors import RequestError
from pegboard.interfaces.structured_output import (
    Constraint,
    Grammar,
    StructuredOutput,
    StructuredOutputSetup,
)
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard_testing import structured_output_cases as cases
from pegboard_testing import structured_output_strategies as strategies

EOS = 256
WORDS = (
    b'{"',
    b'":',
    b'": ',
    b'",',
    b'", "',
    b'"}',
    b"},",
    b"}]",
    b"[]",
    b"{}",
    b"true",
    b"false",
    b"null",
    b"name",
    b"age",
    b"10",
    b" hello",
    b"world",
    b"ab",
    b"abc",
    b"yes",
    b" please",
    "é".encode(),
    "👍".encode(),
    b"\n\n",
    b"  ",
    b'\\"',
    b"positive",
    b"-1",
)
VOCAB_SIZE = 256 + 1 + len(WORDS) + 6
"""The bytes of each token: every byte, end of sequence, some longer tokens, and ids that belong to
no token."""

CLOSING = tuple(b'"}]')


@cache
def small_setup() -> StructuredOutputSetup:
    token_bytes = [bytes([value]) for value in range(256)] + [b"", *WORDS]
    vocabulary = Vocabulary(token_bytes, frozenset({EOS}), (EOS,))
    return StructuredOutputSetup(VOCAB_SIZE, lambda: vocabulary, (EOS,), num_threads=2)


def mask_of(backend: StructuredOutput, grammar: Grammar, vocab_size: int) -> np.ndarray:
    """bool [V]."""
    bits = np.zeros((1, -(-vocab_size // 32)), np.uint32)
    backend.fill([grammar], bits)
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


def draw(
    backend: StructuredOutput,
    grammar: Grammar,
    setup: StructuredOutputSetup,
    rng: np.random.Generator,
    patience: int = 24,
) -> bytes | None:
    """Draw a text at temperature 1 from random logits under the masks. Return None if it is not
    complete after many tokens. After `patience` tokens, tokens that close something become more and
    more likely, and tokens that can repeat forever less likely."""
    stops = list(setup.stop_token_ids)
    token_bytes = setup.vocabulary.token_bytes
    text = b""
    for step in range(40 * patience):
        allowed = mask_of(backend, grammar, setup.vocab_size)
        assert allowed.any(), f"no token is allowed after {text!r}"
        may_stop = bool(allowed[stops].any())
        allowed[stops] = False
        tokens = np.flatnonzero(allowed)
        if may_stop and (
            step > patience or not len(tokens) or rng.random() < 1 / (1 + len(tokens))
        ):
            return text
        weights = rng.normal(size=len(tokens)) * 2 + rng.gumbel(size=len(tokens))
        if step > patience:
            weights += (step - patience) * _closing(token_bytes)[tokens] - 20 * _endless(
                token_bytes
            )[tokens]
        token = int(tokens[np.argmax(weights)])
        assert grammar.accept([token]) == 1, (
            f"token {token_bytes[token]!r} was allowed after {text!r}"
        )
        text += token_bytes[token]
    return None


_MADE: dict[type, StructuredOutput] = {}


def _closing(token_bytes: Sequence[bytes]) -> np.ndarray:
    return _belongs(
        id(token_bytes), token_bytes, lambda text: len(text) == 1 and text[0] in CLOSING
    )


def _endless(token_bytes: Sequence[bytes]) -> np.ndarray:
    return _belongs(
        -id(token_bytes),
        token_bytes,
        lambda text: not text.strip() or text.strip().isdigit() or not {*b"[{"}.isdisjoint(text),
    )


_KNOWN: dict[int, np.ndarray] = {}


def _belongs(key: int, token_bytes: Sequence[bytes], rule: Callable[[bytes], bool]) -> np.ndarray:
    """Return float [V], which is made once per vocabulary."""
    if key not in _KNOWN:
        _KNOWN[key] = np.array([float(rule(text)) for text in token_bytes])
    return _KNOWN[key]


def json_judge(schema: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return whether the text is JSON and fits the schema, including formats."""
    import jsonschema  # type: ignore[import-untyped]

    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)

    def judge(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text, parse_constant=_refuse)))
        except ValueError:
            return False

    return judge


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def compile_or_none(backend: StructuredOutput, constraint: Constraint) -> Grammar | None:
    """Return the grammar, or None if the backend refuses the constraint in either of the two
    ways."""
    if backend.reject(constraint) is not None:
        return None
    try:
        return backend.compile(constraint)
    except RequestError:
        return None


class StructuredOutputContract:
    """Every backend passes these. kinds: the kinds of constraints that its spec supports. takes:
    names of cases.JSON_SCHEMAS that it must not refuse. num_samples: number of texts per
    constraint."""

    kinds: ClassVar[tuple[str, ...]] = (
        "json",
        "json_object",
        "regex",
        "choice",
        "grammar",
        "structural_tag",
    )
    takes: ClassVar[tuple[str, ...]] = (
        "person",
        "tree",
        "shape",
        "optional properties",
        "all optional",
        "map",
        "array sizes",
        "integer range",
        "pattern",
        "string sizes",
        "enum",
        "boolean",
        "date",
        "uuid",
        "free object",
    )
    num_samples: ClassVar[int] = 6

    def backend(self, setup: StructuredOutputSetup) -> StructuredOutput:
        raise AssertionError("override StructuredOutputContract.backend")

    @pytest.fixture
    def small(self) -> StructuredOutputSetup:
        return small_setup()

    @pytest.fixture
    def subject(self, small: StructuredOutputSetup) -> StructuredOutput:
        """One backend per class, because its tokenizer tables take time to build."""
        if type(self) not in _MADE:
            _MADE[type(self)] = self.backend(small)
        return _MADE[type(self)]

    def samples_satisfy(
        self,
        subject: StructuredOutput,
        small: StructuredOutputSetup,
        constraint: Constraint,
        judge: Callable[[str], bool],
        seed: int = 0,
    ) -> None:
        if constraint.kind not in self.kinds:
            assert subject.reject(constraint) is not None
            return
        grammar = compile_or_none(subject, constraint)
        if grammar is None:
            pytest.skip("refused")
        rng = np.random.default_rng(seed)
        complete = 0
        for _ in range(self.num_samples):
            text = draw(subject, grammar.fork(), small, rng)
            if text is not None:
                complete += 1
                assert judge(text.decode("utf-8", "surrogatepass")), f"{constraint}: {text!r}"
        assert complete, "no text was complete"

    def test_built_without_a_vocabulary(self) -> None:
        def load() -> Vocabulary:
            raise AssertionError(
                "the vocabulary must be read with the first constraint, not before"
            )

        backend = self.backend(StructuredOutputSetup(VOCAB_SIZE, load))
        for kind in ("json_object", "choice", "regex"):
            backend.reject(Constraint(kind, '["a"]'))

    @pytest.mark.parametrize("name", cases.JSON_SCHEMAS)
    def test_json(self, subject: StructuredOutput, small: StructuredOutputSetup, name: str) -> None:
        schema = cases.JSON_SCHEMAS[name]
        constraint = Constraint("json", json.dumps(schema))
        if "json" in self.kinds and name in self.takes:
            assert subject.reject(constraint) is None
            subject.compile(constraint)
        self.samples_satisfy(subject, small, constraint, json_judge(schema))

    @pytest.mark.parametrize("index", range(len(cases.SUITE)))
    def test_json_instances(
        self, subject: StructuredOutput, small: StructuredOutputSetup, index: int
    ) -> None:
        schema, valid, invalid = cases.SUITE[index]
        judge = json_judge(schema)
        if "json" not in self.kinds:
            return  # `test_json` checks that it is refused
        grammar = compile_or_none(subject, Constraint("json", json.dumps(schema)))
        if grammar is None:
            pytest.skip("refused")
        for instance in invalid:
            text = json.dumps(instance, ensure_ascii=False)
            assert not judge(text) and not self.accepts(subject, small, grammar, text), (
                f"{schema}: {text}"
            )
        assert any(
            self.accepts(subject, small, grammar, json.dumps(instance, ensure_ascii=False))
            for instance in valid
        ), schema

    def accepts(
        self, subject: StructuredOutput, small: StructuredOutputSetup, grammar: Grammar, text: str
    ) -> bool:
        """Accept the text, byte by byte, and then a stop token."""
        state = grammar.fork()
        data = text.encode()
        return state.accept(list(data)) == len(data) and bool(
            mask_of(subject, state, small.vocab_size)[EOS]
        )

    def test_json_object(self, subject: StructuredOutput, small: StructuredOutputSetup) -> None:
        self.samples_satisfy(
            subject, small, Constraint("json_object", ""), json_judge({"type": "object"})
        )

    @pytest.mark.parametrize("pattern", [*cases.REGEXES, *cases.ODD_REGEXES])
    def test_regex(
        self, subject: StructuredOutput, small: StructuredOutputSetup, pattern: str
    ) -> None:
        if "regex" in self.kinds and pattern in cases.REGEXES[:4]:
            subject.compile(Constraint("regex", pattern))
        self.samples_satisfy(
            subject,
            small,
            Constraint("regex", pattern),
            lambda text: bool(re.fullmatch(pattern, text)),
        )

    @pytest.mark.parametrize("index", range(len(cases.CHOICES)))
    def test_choice(
        self, subject: StructuredOutput, small: StructuredOutputSetup, index: int
    ) -> None:
        choices = cases.CHOICES[index]
        constraint = Constraint("choice", json.dumps(choices))
        if index in (0, 1, 3):
            subject.compile(constraint)
        self.samples_satisfy(subject, small, constraint, choices.__contains__)
        grammar = subject.compile(constraint)  # it was neither refused nor skipped
        for text in choices:
            assert self.accepts(subject, small, grammar, text) and not self.accepts(
                subject, small, grammar, text + "?"
            )

    @pytest.mark.parametrize(
        "constraint",
        [
            *(Constraint("json", json.dumps(schema)) for schema in cases.BAD_SCHEMAS),
            *(Constraint("regex", pattern) for pattern in cases.BAD_REGEXES),
            Constraint("grammar", 'root ::= "a" missing'),
            Constraint("grammar", "start: missing"),
            Constraint("grammar", 'root ::= "a'),
            Constraint("structural_tag", "{}"),
            Constraint("structural_tag", '{"structures": 3, "triggers": []}'),
            Constraint(
                "structural_tag", '{"type": "structural_tag", "format": {"type": "nonsense"}}'
            ),
        ],
        ids=lambda constraint: f"{constraint.kind} {constraint.text}",
    )
    def test_what_is_wrong_is_refused_in_words(
        self, subject: StructuredOutput, constraint: Constraint
    ) -> None:
        if (reason := subject.reject(constraint)) is not None:
            assert len(reason) > 5
            return
        with pytest.raises(RequestError) as caught:
            subject.compile(constraint)
        assert len(str(caught.value)) > 5 and caught.value.parameter == "structured_outputs"

    @pytest.mark.parametrize("kind", ["json", "regex"])
    def test_what_no_text_satisfies_is_refused(self, subject: StructuredOutput, kind: Any) -> None:
        for constraint in (Constraint(kind, text) for case, text in cases.NO_TEXT if case == kind):
            assert compile_or_none(subject, constraint) is None, constraint

    def test_hostile_constraints_are_refused_or_enforced(
        self, subject: StructuredOutput, small: StructuredOutputSetup
    ) -> None:
        for i, (kind, text) in enumerate(cases.HOSTILE):
            self.survives(subject, small, Constraint(kind, text), seed=i)  # type: ignore[arg-type]

    @pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
    def test_random_constraints_are_refused_or_enforced(
        self, subject: StructuredOutput, small: StructuredOutputSetup, kind: Any
    ) -> None:
        strategy = {
            "json": strategies.schemas().map(json.dumps),
            "regex": strategies.regexes(),
            "grammar": strategies.grammars(),
        }

        @settings(deadline=None, max_examples=60, derandomize=True, database=None)
        @given(strategy[kind])
        def check(text: str) -> None:
            self.survives(subject, small, Constraint(kind, text))

        check()

    def survives(
        self,
        subject: StructuredOutput,
        small: StructuredOutputSetup,
        constraint: Constraint,
        seed: int = 0,
    ) -> None:
        """Check that the constraint is refused in words, or that 50 random tokens are drawn from
        its masks and undone without an exception. A backend may give up with a RequestError, which
        ends one request, but not at the first mask."""
        if subject.reject(constraint) is not None:
            return
        try:
            grammar = subject.compile(constraint).fork()
        except RequestError:
            return
        rng = np.random.default_rng(seed)
        tokens = 0
        allowed = mask_of(subject, grammar, small.vocab_size)
        assert allowed.any(), f"{constraint}: no token is allowed at first"
        try:
            for _ in range(50):
                allowed[EOS] = False
                if not allowed.any():
                    break
                token = int(rng.choice(np.flatnonzero(allowed)))
                assert grammar.accept([token]) == 1, f"{constraint}: the mask allows token {token}"
                tokens += 1
                allowed = mask_of(subject, grammar, small.vocab_size)
            grammar.rollback(tokens)
            grammar.fork()
        except RequestError:
            return

    def test_kinds_that_are_not_supported_are_refused(self, subject: StructuredOutput) -> None:
        texts = {
            "json": "{}",
            "choice": '["a"]',
            "regex": "a",
            "grammar": 'root ::= "a"',
            "structural_tag": "{}",
            "json_object": "",
        }
        for kind, text in texts.items():
            if kind not in self.kinds:
                assert subject.reject(Constraint(kind, text)) is not None, kind  # type: ignore[arg-type]

    def test_options_are_honoured_or_refused(
        self, subject: StructuredOutput, small: StructuredOutputSetup
    ) -> None:
        schema = {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "minItems": 2}},
            "required": ["a"],
        }
        text = json.dumps(schema)
        rng = np.random.default_rng(0)
        if grammar := compile_or_none(
            subject, Constraint("json", text, disable_any_whitespace=True)
        ):
            for _ in range(10):
                drawn = draw(subject, grammar.fork(), small, rng)
                assert drawn is None or not re.search(rb"\s\s|\n|\t|[\[{] | [\]}]", drawn)
        if grammar := compile_or_none(
            subject, Constraint("json", text, disable_additional_properties=True)
        ):
            assert not self.accepts(subject, small, grammar, '{"a": [true, true], "b": 1}')
        if grammar := compile_or_none(subject, Constraint("json", text, whitespace_pattern="_?")):
            assert not self.accepts(subject, small, grammar, '{ "a": [true, true]}')

    # --- states -----------------------------------------------------------------------------------

    def some_constraint(self) -> Constraint:
        if "json" in self.kinds:
            return Constraint("json", json.dumps(cases.PERSON))
        if "regex" in self.kinds:
            return Constraint("regex", cases.REGEXES[3])
        return Constraint("choice", json.dumps(["ab" * 30, "aa" * 60]))

    def walk(
        self,
        subject: StructuredOutput,
        small: StructuredOutputSetup,
        grammar: Grammar,
        rng: np.random.Generator,
        length: int,
    ) -> tuple[list[int], list[np.ndarray]]:
        """Accept random allowed tokens. Return the tokens, the mask before each, and the mask after
        the last."""
        tokens: list[int] = []
        masks = [mask_of(subject, grammar, small.vocab_size)]
        while len(tokens) < length:
            allowed = np.flatnonzero(masks[-1])
            allowed = allowed[allowed != EOS]
            if not len(allowed):
                break
            tokens.append(int(rng.choice(allowed)))
            assert grammar.accept(tokens[-1:]) == 1
            masks.append(mask_of(subject, grammar, small.vocab_size))
        return tokens, masks

    @pytest.mark.parametrize("seed", range(4))
    def test_rollback_undoes(
        self, subject: StructuredOutput, small: StructuredOutputSetup, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        grammar = subject.compile(self.some_constraint()).fork()
        tokens, masks = self.walk(subject, small, grammar, rng, 24)
        for _ in range(6):
            back = int(rng.integers(0, len(tokens) + 1))
            grammar.rollback(back)
            at = len(tokens) - back
            assert (mask_of(subject, grammar, small.vocab_size) == masks[at]).all()
            assert grammar.accept(tokens[at:]) == back
        assert (mask_of(subject, grammar, small.vocab_size) == masks[-1]).all()

    @pytest.mark.parametrize("seed", range(4))
    def test_forks_are_independent(
        self, subject: StructuredOutput, small: StructuredOutputSetup, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        root = subject.compile(self.some_constraint())
        before = mask_of(subject, root, small.vocab_size)
        grammar = root.fork()
        _, masks = self.walk(subject, small, grammar, rng, 9)
        copy = grammar.fork()
        assert (mask_of(subject, copy, small.vocab_size) == masks[-1]).all()
        more, _ = self.walk(subject, small, copy, rng, 5)
        assert (mask_of(subject, grammar, small.vocab_size) == masks[-1]).all()
        assert grammar.accept(more) == len(more)
        assert (mask_of(subject, root, small.vocab_size) == before).all()

    @pytest.mark.parametrize("seed", range(3))
    def test_accept_agrees_with_the_mask(
        self, subject: StructuredOutput, small: StructuredOutputSetup, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        grammar = subject.compile(self.some_constraint()).fork()
        self.walk(subject, small, grammar, rng, int(rng.integers(0, 20)))
        mask = mask_of(subject, grammar, small.vocab_size)
        known = [
            token
            for token in range(small.vocab_size)
            if token != EOS and small.vocabulary.token_bytes[token]
        ]
        for token in rng.choice(known, 60, replace=False).tolist():
            assert grammar.fork().accept([token]) == mask[token], small.vocabulary.token_bytes[
                token
            ]
        first = next(token for token in known if mask[token])
        forbidden = next(token for token in known if not mask[token])
        assert grammar.fork().accept([forbidden]) == 0
        tried = grammar.fork()
        assert tried.accept([first, forbidden, forbidden]) in (1, 2, 3)
        assert not mask[VOCAB_SIZE - 6 :].any(), "ids without a token must never be allowed"

    def test_a_batch_is_filled_as_its_rows(
        self, subject: StructuredOutput, small: StructuredOutputSetup
    ) -> None:
        rng = np.random.default_rng(1)
        constraints = [self.some_constraint(), Constraint("choice", json.dumps(cases.CHOICES[0]))]
        if "regex" in self.kinds:
            constraints.append(Constraint("regex", "a+b"))
        roots = [subject.compile(constraint) for constraint in constraints]
        grammars = [roots[i % len(roots)].fork() for i in range(11)]
        for grammar in grammars:
            self.walk(subject, small, grammar, rng, int(rng.integers(0, 4)))
        bits = np.zeros((len(grammars), -(-small.vocab_size // 32)), np.uint32)
        subject.fill(grammars, bits)
        whole = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[
            :, : small.vocab_size
        ].astype(bool)
        for grammar, row in zip(grammars, whole, strict=True):
            assert (mask_of(subject, grammar, small.vocab_size) == row).all()

    def test_a_model_without_end_of_sequence(self) -> None:
        """The text must end where nothing may follow, or the backend refuses the constraint."""
        vocabulary = Vocabulary(small_setup().vocabulary.token_bytes, frozenset({EOS}), ())
        setup = StructuredOutputSetup(VOCAB_SIZE, lambda: vocabulary)
        subject = self.backend(setup)
        grammar = compile_or_none(subject, Constraint("choice", '["ab"]'))
        if grammar is not None:
            assert (
                grammar.accept(list(b"ab")) == 2 and not mask_of(subject, grammar, VOCAB_SIZE).any()
            )

    def test_compiling_in_several_threads(self, small: StructuredOutputSetup) -> None:
        subject = self.backend(small)
        constraints = [Constraint("choice", json.dumps([f"x{i}", f"y{i}"])) for i in range(8)]
        with ThreadPoolExecutor(4) as threads:
            grammars = list(threads.map(subject.compile, constraints))
        for i, grammar in enumerate(grammars):
            assert self.accepts(subject, small, grammar, f"x{i}") and not self.accepts(
                subject, small, grammar, f"x{i + 1}"
            )
