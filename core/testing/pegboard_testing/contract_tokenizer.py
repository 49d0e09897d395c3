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
    def made(self) -> Tokenizer:
        return self.tokenizer()

    def token_ids(self, made: Tokenizer, seed: int) -> list[int]:
        """Make random ids of a text, of arbitrary tokens (parts of characters, special tokens), or
        of both."""
        rng = np.random.default_rng(seed)
        text = made.encode(TEXTS[seed % len(TEXTS)], add_special_tokens=False)
        anything = rng.integers(0, made.vocabulary().size, int(rng.integers(0, 30))).tolist()
        return [*text, *anything] if seed % 3 else text or anything

    def streamed(
        self,
        made: Tokenizer,
        prompt: Sequence[int],
        ids: Sequence[int],
        cuts: Sequence[int],
        skip: bool,
    ) -> str:
        """Return the text of `ids`, which are pushed into a stream in pieces."""
        stream = made.stream(prompt, skip_special_tokens=skip)
        borders = [0, *sorted(cuts), len(ids)]
        pieces = [stream.push(list(ids[a:b])) for a, b in zip(borders, borders[1:], strict=False)]
        return "".join(pieces) + stream.flush()

    # --- text to ids and back ---------------------------------------------------------------------

    @pytest.mark.parametrize("text", TEXTS)
    def test_decode_gives_back_what_was_encoded(self, made: Tokenizer, text: str) -> None:
        ids = made.encode(text, add_special_tokens=False)
        assert all(0 <= token < made.vocabulary().size for token in ids)
        assert ids == made.encode(text, add_special_tokens=False)
        if self.round_trips:
            assert made.decode(ids, skip_special_tokens=False) == text

    def test_special_tokens_are_added_only_when_asked_for(self, made: Tokenizer) -> None:
        plain = made.encode("hello", add_special_tokens=False)
        full = made.encode("hello", add_special_tokens=True)
        special = made.vocabulary().special_token_ids
        assert not special & set(plain)
        assert [token for token in full if token not in special] == plain

    def test_special_tokens_written_in_the_text_are_recognised(self, made: Tokenizer) -> None:
        """A special token that a chat template writes becomes the token itself. If decode skips it,
        the text around it stays."""
        num_seen = 0
        for token in sorted(made.vocabulary().special_token_ids):
            written = made.decode([token], skip_special_tokens=False)
            ids = made.encode(written, add_special_tokens=False)
            num_seen += ids == [token]
            assert not made.decode([token], skip_special_tokens=True)
        assert num_seen, "no special token is recognized in text"

    def test_text_without_utf8_is_the_requests_error(self, made: Tokenizer) -> None:
        for text in ("\ud800", "a \udfff b"):
            with pytest.raises(RequestError, match="UTF-8"):
                made.encode(text, add_special_tokens=False)

    def test_ids_outside_the_vocabulary_have_no_text(self, made: Tokenizer) -> None:
        """The embedding may have more rows than the tokenizer has tokens."""
        ids = made.encode("hello", add_special_tokens=False)
        size = made.vocabulary().size
        assert made.decode([size, *ids, size + 1000], skip_special_tokens=False) == made.decode(
            ids, skip_special_tokens=False
        )
        assert made.decode([], skip_special_tokens=True) == ""

    # --- the vocabulary ---------------------------------------------------------------------------

    def test_the_vocabulary_is_complete_and_kept(self, made: Tokenizer) -> None:
        vocabulary = made.vocabulary()
        assert vocabulary is made.vocabulary(), "compute the vocabulary once: it is read often"
        assert isinstance(vocabulary, Vocabulary) and vocabulary.size > 0
        tokens = {*vocabulary.special_token_ids, *vocabulary.eos_token_ids}
        tokens |= {vocabulary.bos_token_id} if vocabulary.bos_token_id is not None else set()
        assert vocabulary.eos_token_ids and all(0 <= token < vocabulary.size for token in tokens)
        assert all(vocabulary.token_bytes[token] == b"" for token in vocabulary.special_token_ids)
        assert all(isinstance(data, bytes) for data in vocabulary.token_bytes)

    @pytest.mark.parametrize("text", TEXTS)
    def test_the_bytes_of_the_tokens_spell_the_text(self, made: Tokenizer, text: str) -> None:
        """Grammars rely on the bytes of tokens. Tokenizers may differ in whether they add a space
        before the first word."""
        if self.round_trips:
            table = made.vocabulary().token_bytes
            spelled = b"".join(
                table[token] for token in made.encode(text, add_special_tokens=False)
            )
            assert spelled.decode("utf-8") in (text, " " + text, text.removeprefix(" "))

    # --- streams ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("skip", [False, True])
    @pytest.mark.parametrize("seed", range(24))
    def test_a_stream_ends_as_decode_says(self, made: Tokenizer, seed: int, skip: bool) -> None:
        """The text is always the same, whether ids are pushed at once, one by one, in any pieces,
        or after a prefix."""
        rng = np.random.default_rng(seed)
        ids = self.token_ids(made, seed)
        whole = made.decode(ids, skip_special_tokens=skip)
        for cuts in ([], list(range(1, len(ids))), rng.integers(0, len(ids) + 1, 4).tolist()):
            assert self.streamed(made, [], ids, cuts, skip) == whole

    @pytest.mark.parametrize("seed", range(8))
    def test_a_prompt_is_context_and_no_output(self, made: Tokenizer, seed: int) -> None:
        prompt = made.encode("Once upon a time", add_special_tokens=True)
        ids = made.encode(TEXTS[seed], add_special_tokens=False)
        cuts = list(range(1, len(ids)))
        found = self.streamed(made, prompt, ids, cuts, True)
        assert (
            made.decode([*prompt, *ids], skip_special_tokens=True)
            == made.decode(prompt, skip_special_tokens=True) + found
        )

    @pytest.mark.parametrize("text", TEXTS)
    def test_no_half_character_leaves_a_stream(self, made: Tokenizer, text: str) -> None:
        stream = made.stream([], skip_special_tokens=True)
        assert not any(
            "\ufffd" in stream.push([token])
            for token in made.encode(text, add_special_tokens=False)
        )

    def test_threads_share_a_tokenizer(self, made: Tokenizer) -> None:
        expected = [made.encode(text, add_special_tokens=True) for text in TEXTS]
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(lambda text: made.encode(text, add_special_tokens=True), TEXTS * 5)
            )
        assert found == expected * 5

    # --- chat templates ---------------------------------------------------------------------------

    def test_a_template_is_rendered(self) -> None:
        made = self.tokenizer(TEMPLATE)
        for adds in (False, True):
            rendered = made.render(
                Chat(messages=[{"role": "user", "content": "hi"}], add_special_tokens=adds)
            )
            assert rendered.text == "[user]hi"
            assert list(rendered.token_ids) == made.encode("[user]hi", add_special_tokens=adds)

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

    def test_the_names_of_transformers_agree_with_the_interface(self, made: Tokenizer) -> None:
        """A tokenizer that derives from `pegboard_chat.TransformersMethods` gives scripts what they
        expect."""
        if not callable(made):
            pytest.skip("it has only the interface")
        own: Any = made
        known = made.vocabulary()
        for text in TEXTS:
            ids = made.encode(text, add_special_tokens=True)
            assert own.encode(text) == own(text).input_ids == own([text])["input_ids"][0] == ids
            assert own(text)["attention_mask"] == [1] * len(ids)
            assert own.encode(text, False) == made.encode(text, add_special_tokens=False)
            assert own.decode(ids) == made.decode(ids, skip_special_tokens=False)
            assert (
                own.decode(ids, True)
                == own.batch_decode([ids], True)[0]
                == made.decode(ids, skip_special_tokens=True)
            )
            assert own.tokenize(text) == own.convert_ids_to_tokens(own.encode(text, False))
        vocabulary = own.get_vocab()
        assert len(own) == own.vocab_size == known.size >= len(vocabulary)
        assert set(own.all_special_ids) == known.special_token_ids
        assert own.convert_tokens_to_ids(own.all_special_tokens) == own.all_special_ids
        assert (
            own.convert_tokens_to_ids("no such token at all") is None and own.pad_token_id is None
        )
        assert (
            own.eos_token_id in known.eos_token_ids
            and own.decode(own.eos_token_id) == own.eos_token
        )
        assert (
            own.convert_tokens_to_ids(own.eos_token) == own.eos_token_id
            and vocabulary[own.eos_token] == own.eos_token_id
        )
        assert own.special_tokens_map["eos_token"] == own.eos_token
        assert own.bos_token_id == known.bos_token_id and (own.bos_token is None) is (
            known.bos_token_id is None
        )

    def test_a_chat_template_is_applied_as_by_transformers(self) -> None:
        made: Any = self.tokenizer(TEMPLATE)
        if not callable(made):
            pytest.skip("it has only the interface")
        messages = [{"role": "user", "content": "hi"}]
        rendered = made.render(Chat(messages=messages, add_generation_prompt=False))
        assert made.apply_chat_template(messages) == list(rendered.token_ids)
        assert made.apply_chat_template(messages, tokenize=False) == (
            rendered.text or made.decode(rendered.token_ids)
        )
        with pytest.raises(RequestError, match="cannot both be true"):
            made.apply_chat_template(
                messages, add_generation_prompt=True, continue_final_message=True
            )
