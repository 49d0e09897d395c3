"""Contract tests of the kind `tokenizer`. A plugin's test file:

    class TestMyTokenizer(TokenizerContract):
        def tokenizer(self, chat_template: str | None = None) -> Tokenizer:
            return MyTokenizer(None, TokenizerSetup(checkpoint, chat_template))

The tokenizer under test needs at least one special token and an end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pegboard.errors import RequestError
from pegboard.interfaces.tokenizer import Chat, Tokenizer, Vocabulary

TEXTS = (
    "hello world",
    " leading and trailing ",
    "a\n\n  b\tc",
    "naïve café, größer Straße",
    "日本語のテキスト",
    "👩‍👩‍👧 and 🇩🇪!",
    "",
    "0123456789 3.14 it's",
)
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


class TokenizerContract:
    """Every tokenizer passes these. Override `tokenizer`. Set `round_trips = False` for one that
    does not preserve all text."""

    round_trips = True

    def tokenizer(self, chat_template: str | None = None) -> Tokenizer:
        """Return a new tokenizer. If a template is given, it replaces the checkpoint's."""
        raise AssertionError("override TokenizerContract.tokenizer")

    @pytest.fixture
    def subject(self) -> Tokenizer:
        return self.tokenizer()

    def token_ids(self, subject: Tokenizer, seed: int) -> list[int]:
        """Make random ids of a text, of arbitrary tokens (parts of characters, special tokens), or
        of both."""
        rng = np.random.default_rng(seed)
        text = subject.encode(TEXTS[seed % len(TEXTS)], add_special_tokens=False)
        anything = rng.integers(0, subject.vocabulary().size, int(rng.integers(0, 30))).tolist()
        return [*text, *anything] if seed % 3 else text or anything

    def streamed(
        self,
        subject: Tokenizer,
        prompt: Sequence[int],
        ids: Sequence[int],
        cuts: Sequence[int],
        skip: bool,
    ) -> str:
        """Return the text of `ids`, which are pushed into a stream in pieces."""
        stream = subject.stream(prompt, skip_special_tokens=skip)
        borders = [0, *sorted(cuts), len(ids)]
        pieces = [stream.push(list(ids[a:b])) for a, b in zip(borders, borders[1:], strict=False)]
        return "".join(pieces) + stream.flush()

    # --- text to ids and back ---------------------------------------------------------------------

    @pytest.mark.parametrize("text", TEXTS)
    def test_decode_gives_back_what_was_encoded(self, subject: Tokenizer, text: str) -> None:
        ids = subject.encode(text, add_special_tokens=False)
        assert all(0 <= token < subject.vocabulary().size for token in ids)
        assert ids == subject.encode(text, add_special_tokens=False)
        if self.round_trips:
            assert subject.decode(ids, skip_special_tokens=False) == text

    def test_special_tokens_are_added_only_when_asked_for(self, subject: Tokenizer) -> None:
        plain = subject.encode("hello", add_special_tokens=False)
        full = subject.encode("hello", add_special_tokens=True)
        special = subject.vocabulary().special_token_ids
        assert not special & set(plain)
        assert [token for token in full if token not in special] == plain

    def test_special_tokens_written_in_the_text_are_recognised(self, subject: Tokenizer) -> None:
        """A special token that a chat template writes becomes the token itself. If decode skips it,
        the text around it stays."""
        num_seen = 0
        for token in sorted(subject.vocabulary().special_token_ids):
            written = subject.decode([token], skip_special_tokens=False)
            ids = subject.encode(written, add_special_tokens=False)
            num_seen += ids == [token]
            assert not subject.decode([token], skip_special_tokens=True)
        assert num_seen, "no special token is recognized in text"

    def test_text_without_utf8_is_the_requests_error(self, subject: Tokenizer) -> None:
        for text in ("\ud800", "a \udfff b"):
            with pytest.raises(RequestError, match="UTF-8"):
                subject.encode(text, add_special_tokens=False)

    def test_ids_outside_the_vocabulary_have_no_text(self, subject: Tokenizer) -> None:
        """The embedding may have more rows than the tokenizer has tokens."""
        ids = subject.encode("hello", add_special_tokens=False)
        size = subject.vocabulary().size
        assert subject.decode(
            [size, *ids, size + 1000], skip_special_tokens=False
        ) == subject.decode(ids, skip_special_tokens=False)
        assert subject.decode([], skip_special_tokens=True) == ""

    # --- the vocabulary ---------------------------------------------------------------------------

    def test_the_vocabulary_is_complete_and_kept(self, subject: Tokenizer) -> None:
        vocabulary = subject.vocabulary()
        assert vocabulary is subject.vocabulary(), "compute the vocabulary once: it is read often"
        assert isinstance(vocabulary, Vocabulary) and vocabulary.size > 0
        tokens = {*vocabulary.special_token_ids, *vocabulary.eos_token_ids}
        tokens |= {vocabulary.bos_token_id} if vocabulary.bos_token_id is not None else set()
        assert vocabulary.eos_token_ids and all(0 <= token < vocabulary.size for token in tokens)
        assert all(vocabulary.token_bytes[token] == b"" for token in vocabulary.special_token_ids)
        assert all(isinstance(data, bytes) for data in vocabulary.token_bytes)

    @pytest.mark.parametrize("text", TEXTS)
    def test_the_bytes_of_the_tokens_spell_the_text(self, subject: Tokenizer, text: str) -> None:
        """Grammars rely on the bytes of tokens. Tokenizers may differ in whether they add a space
        before the first word."""
        if self.round_trips:
            table = subject.vocabulary().token_bytes
            spelled = b"".join(
                table[token] for token in subject.encode(text, add_special_tokens=False)
            )
            assert spelled.decode("utf-8") in (text, " " + text, text.removeprefix(" "))

    # --- streams ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("skip", [False, True])
    @pytest.mark.parametrize("seed", range(24))
    def test_a_stream_ends_as_decode_says(self, subject: Tokenizer, seed: int, skip: bool) -> None:
        """The text is always the same, whether ids are pushed at once, one by one, in any pieces,
        or after a prefix."""
        rng = np.random.default_rng(seed)
        ids = self.token_ids(subject, seed)
        whole = subject.decode(ids, skip_special_tokens=skip)
        for cuts in ([], list(range(1, len(ids))), rng.integers(0, len(ids) + 1, 4).tolist()):
            assert self.streamed(subject, [], ids, cuts, skip) == whole

    @pytest.mark.parametrize("seed", range(8))
    def test_a_prompt_is_context_and_no_output(self, subject: Tokenizer, seed: int) -> None:
        prompt = subject.encode("Once upon a time", add_special_tokens=True)
        ids = subject.encode(TEXTS[seed], add_special_tokens=False)
        cuts = list(range(1, len(ids)))
        output = self.streamed(subject, prompt, ids, cuts, True)
        assert (
            subject.decode([*prompt, *ids], skip_special_tokens=True)
            == subject.decode(prompt, skip_special_tokens=True) + output
        )

    @pytest.mark.parametrize("text", TEXTS)
    def test_no_half_character_leaves_a_stream(self, subject: Tokenizer, text: str) -> None:
        stream = subject.stream([], skip_special_tokens=True)
        assert not any(
            "\ufffd" in stream.push([token])
            for token in subject.encode(text, add_special_tokens=False)
        )

    def test_threads_share_a_tokenizer(self, subject: Tokenizer) -> None:
        expected = [subject.encode(text, add_special_tokens=True) for text in TEXTS]
        with ThreadPoolExecutor(4) as pool:
            actual = list(
                pool.map(lambda text: subject.encode(text, add_special_tokens=True), TEXTS * 5)
            )
        assert actual == expected * 5

    # --- chat templates ---------------------------------------------------------------------------

    def test_a_template_is_rendered(self) -> None:
        subject = self.tokenizer(TEMPLATE)
        for adds in (False, True):
            rendered = subject.render(
                Chat(messages=[{"role": "user", "content": "hi"}], add_special_tokens=adds)
            )
            assert rendered.text == "[user]hi"
            assert list(rendered.token_ids) == subject.encode("[user]hi", add_special_tokens=adds)

    def test_the_requests_own_template_wins(self) -> None:
        chat = Chat(
            messages=[{"role": "user", "content": "hi"}],
            chat_template="<{{ messages[0].content }}>",
        )
        assert self.tokenizer(TEMPLATE).render(chat).text == "<hi>"

    @pytest.mark.parametrize(
        "template", ["{{ 1 / 0 }}", "{% for", "{{ raise_exception('not this') }}"]
    )
    def test_a_broken_template_is_the_requests_error(self, template: str) -> None:
        with pytest.raises(RequestError):
            self.tokenizer().render(
                Chat(messages=[{"role": "user", "content": "hi"}], chat_template=template)
            )

    def test_a_template_cannot_reach_outside(self) -> None:
        """Templates come from checkpoints and requests, so they run in a sandbox."""
        evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
        with pytest.raises(RequestError):
            self.tokenizer().render(Chat(messages=[], chat_template=evil))

    def test_the_names_of_transformers_agree_with_the_interface(self, subject: Tokenizer) -> None:
        """A tokenizer that derives from `pegboard_chat.TransformersMethods` gives scripts what they
        expect."""
        if not callable(subject):
            pytest.skip("it has only the interface")
        as_transformers: Any = subject
        known = subject.vocabulary()
        for text in TEXTS:
            ids = subject.encode(text, add_special_tokens=True)
            assert (
                as_transformers.encode(text)
                == as_transformers(text).input_ids
                == as_transformers([text])["input_ids"][0]
                == ids
            )
            assert as_transformers(text)["attention_mask"] == [1] * len(ids)
            assert as_transformers.encode(text, False) == subject.encode(
                text, add_special_tokens=False
            )
            assert as_transformers.decode(ids) == subject.decode(ids, skip_special_tokens=False)
            assert (
                as_transformers.decode(ids, True)
                == as_transformers.batch_decode([ids], True)[0]
                == subject.decode(ids, skip_special_tokens=True)
            )
            assert as_transformers.tokenize(text) == as_transformers.convert_ids_to_tokens(
                as_transformers.encode(text, False)
            )
        vocabulary = as_transformers.get_vocab()
        assert len(as_transformers) == as_transformers.vocab_size == known.size >= len(vocabulary)
        assert set(as_transformers.all_special_ids) == known.special_token_ids
        assert (
            as_transformers.convert_tokens_to_ids(as_transformers.all_special_tokens)
            == as_transformers.all_special_ids
        )
        assert (
            as_transformers.convert_tokens_to_ids("no such token at all") is None
            and as_transformers.pad_token_id is None
        )
        assert (
            as_transformers.eos_token_id in known.eos_token_ids
            and as_transformers.decode(as_transformers.eos_token_id) == as_transformers.eos_token
        )
        assert (
            as_transformers.convert_tokens_to_ids(as_transformers.eos_token)
            == as_transformers.eos_token_id
            and vocabulary[as_transformers.eos_token] == as_transformers.eos_token_id
        )
        assert as_transformers.special_tokens_map["eos_token"] == as_transformers.eos_token
        assert as_transformers.bos_token_id == known.bos_token_id and (
            as_transformers.bos_token is None
        ) is (known.bos_token_id is None)

    def test_a_chat_template_is_applied_as_by_transformers(self) -> None:
        subject: Any = self.tokenizer(TEMPLATE)
        if not callable(subject):
            pytest.skip("it has only the interface")
        messages = [{"role": "user", "content": "hi"}]
        rendered = subject.render(Chat(messages=messages, add_generation_prompt=False))
        assert subject.apply_chat_template(messages) == list(rendered.token_ids)
        assert subject.apply_chat_template(messages, tokenize=False) == (
            rendered.text or subject.decode(rendered.token_ids)
        )
        with pytest.raises(RequestError, match="cannot both be true"):
            subject.apply_chat_template(
                messages, add_generation_prompt=True, continue_final_message=True
            )
