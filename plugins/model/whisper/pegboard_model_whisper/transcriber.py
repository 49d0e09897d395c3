"""How Whisper is asked, and what its times mean (Radford et al. 2022, section 2.3).

<|startofprev|> text <|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>

The language and the task are left out if the model has only English.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import Question, Segment, Wish
from pegboard.interfaces.tokenizer import Tokenizer
from pegboard_model_whisper.times_request import NAME

ENGLISH_SIZE = 51864
"""The size of the vocabulary of models that know only English."""
STEP_S = 0.02
"""Seconds from one time to the next."""


class WhisperTranscriber:
    """See `pegboard.interfaces.multimodal_processor.Transcriber`."""

    has_times = True

    def __init__(self, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.begin = self._token("<|startoftranscript|>")
        self.end = self._token("<|endoftext|>")
        self.before = self._token("<|startofprev|>")
        self.no_times = self._token("<|notimestamps|>")
        self.first_time = self.no_times + 1
        tasks = [self._token(f"<|{task}|>") for task in ("transcribe", "translate")]
        self.transcribe, self.translate = tasks
        names = language_names()
        ids = {code: self._id(f"<|{code}|>") for code in names}
        self.codes = {code: token for code, token in ids.items() if token is not None}
        # their tokenizer has other languages, too
        self.is_multilingual = config.get("vocab_size") != ENGLISH_SIZE
        known = self.codes if self.is_multilingual else {"en": 0}
        self.languages = {code: names[code] for code in known}
        self.longest_text = int(config["max_target_positions"]) // 2 - 1

    def _id(self, text: str) -> int | None:
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        is_known = self.tokenizer.decode(token_ids, skip_special_tokens=False) == text
        return token_ids[0] if len(token_ids) == 1 and is_known else None

    def _token(self, text: str) -> int:
        token = self._id(text)
        if token is None:
            raise ModelError(f"the checkpoint's tokenizer has no token {text}; is it Whisper's?")
        return token

    def question(self, wish: Wish) -> Question:
        tokens: list[int] = []
        if wish.text:
            text = self.tokenizer.encode(f" {wish.text.strip()}", add_special_tokens=False)
            tokens += [self.before, *text[-self.longest_text :]]
        tokens.append(self.begin)
        if self.is_multilingual:
            task = self.translate if wish.translates else self.transcribe
            tokens += [self.codes[wish.language or "en"], task]
        elif wish.translates:
            raise RequestError("this Whisper knows only English and translates nothing")
        if wish.has_times:
            return Question(tokens, {NAME: [self.end, self.no_times, self.first_time]})
        return Question([*tokens, self.no_times])

    def detection(self) -> tuple[Question, dict[int, str]] | None:
        if not self.is_multilingual:
            return None
        return Question([self.begin]), {token: code for code, token in self.codes.items()}

    def segments(self, token_ids: Sequence[int], seconds: float) -> list[Segment]:
        parts: list[Segment] = []
        start = 0.0
        first = 0

        def close(place: int, stop: float) -> None:
            tokens = [*token_ids[first:place]]
            while tokens and tokens[-1] >= self.end:
                tokens.pop()
            if tokens:
                parts.append(Segment(start, max(start, min(stop, seconds)), first, tokens))

        for place, token in enumerate(token_ids):
            if token >= self.first_time:
                time = (token - self.first_time) * STEP_S
                close(place, time)
                start = max(start, min(time, seconds))
                first = place + 1
        close(len(token_ids), seconds)
        return parts


def language_names() -> dict[str, str]:
    """Return the languages that Whisper was trained on: code → English name."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return dict(LANGUAGES)
