"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.data.media import MediaSource
from pegboard.data.output import RequestOutput
from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import ApiSetup, EngineClient, Prompt
from pegboard.interfaces.multimodal_processor import Question, Transcriber, Wish
from pegboard_api_openai.answer import DONE, FIELDS, AnswerIds, Usage, last_outputs, merge
from pegboard_api_openai.recordings import (
    Clip,
    RecordingFields,
    TranscriptionRequest,
    TranslationRequest,
    read_clips,
    read_form,
)
from pegboard_api_openai.subtitles import Line, segments, srt, vtt
from pegboard_chat.off_loop import off_loop
from pegboard_chat.outputs import check_finished
from pegboard_chat.sampling_fields import SAME, lower
from pegboard_server.json_api import endpoint, error_body, error_event, json_response, served_model
from pegboard_server.streaming import EventStream, chain, first_of, while_connected

TIMED = ("srt", "verbose_json", "vtt")


class TranscriptionApi:
    """Writes down what is said in a recording, or translates it into English."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._client = setup.client

    def routes(self) -> Sequence[BaseRoute]:
        transcribe = TranscriptionRoute(self._client)
        translate = TranslationRoute(self._client)
        return [
            Route("/v1/audio/transcriptions", endpoint(transcribe.answer), methods=["POST"]),
            Route("/v1/audio/translations", endpoint(translate.answer), methods=["POST"]),
        ]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)


class TranscriptionRoute:
    """A long recording is cut into clips, which are computed side by side. The answer is whole or a
    stream."""

    task = "transcribe"
    prefix = "trsc"
    kind = "transcription.chunk"
    fields: type[RecordingFields] = TranscriptionRequest

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def answer(self, http: Request) -> Response:
        """What is said in a recording, a form with `file`: as JSON, as text or as subtitles, whole
        or with `stream` as server-sent events."""
        client = self._client
        request, content = await read_form(http, self.fields)
        transcriber = client.transcriber()
        if transcriber is None:
            raise RequestError(
                "this model does not write down speech; serve one that does, for example Whisper",
                parameter="model",
            )
        self.check(request, transcriber)
        model, lora = await served_model(client, request.model)
        ids = AnswerIds(self.prefix, http, request.request_id, lora)
        clips, seconds = await off_loop(
            len(content), lambda: read_clips(content, transcriber.rate, transcriber.seconds)
        )
        language = language_of(request.language, transcriber)
        if language is None and (detection := transcriber.detection()) is not None:
            question, codes = detection
            prompt = about(clips[0], question, transcriber)
            language = await while_connected(
                http.receive, self._detect(prompt, question, codes, ids)
            )
        has_times = request.response_format in TIMED
        wish = Wish(
            translates=self.task == "translate",
            language=language,
            text=request.prompt,
            has_times=has_times,
        )
        question = transcriber.question(wish)
        params = self._params(request, question)
        prompts = [about(clip, question, transcriber) for clip in clips]
        outputs = [
            client.generate(each, params, ids.options(0, index if len(clips) > 1 else None))
            for index, each in enumerate(prompts)
        ]
        head = {"id": ids.response_id, "object": self.kind, "model": model}
        try:
            if request.stream:
                return await self._stream(outputs, {**head, "created": int(time.time())}, request)
            whole = await while_connected(http.receive, last_outputs(merge(outputs), len(clips)))
        except RequestError as error:
            error.parameter = FIELDS.get(error.parameter or "", error.parameter)
            raise
        for output in whole:
            check_finished(output)
        if has_times:
            lines = self._lines(whole, clips, transcriber)
            return self._timed(
                lines, request, seconds, language and transcriber.languages[language]
            )
        text = "".join(output.outputs[0].text for output in whole).strip()
        if request.response_format == "text":
            return PlainTextResponse(f"{text}\n")
        return json_response({"text": text, "usage": duration(seconds)})

    def _timed(
        self, lines: Sequence[Line], request: RecordingFields, seconds: float, language: str | None
    ) -> Response:
        """Return an answer that says when something was said. language: its name."""
        if request.response_format == "srt":
            return PlainTextResponse(srt(lines))
        if request.response_format == "vtt":
            return Response(vtt(lines), media_type="text/vtt")
        return json_response(
            {
                "task": self.task,
                "language": language,
                "duration": seconds,
                "text": "".join(line.text for line in lines).strip(),
                "segments": segments(lines, request.temperature),
                "words": None,
                "usage": duration(seconds),
            }
        )

    def check(self, request: Any, transcriber: Transcriber) -> None:
        """Raise RequestError for what cannot be."""
        if "word" in request.timestamp_granularities:
            raise RequestError(
                "timestamp_granularities: the times of words are not known; ask for segment",
                parameter="timestamp_granularities",
            )
        self.check_form(request, transcriber)
        if request.timestamp_granularities and request.response_format not in TIMED:
            raise RequestError(
                "timestamp_granularities needs response_format verbose_json",
                parameter="timestamp_granularities",
            )

    def check_form(self, request: RecordingFields, transcriber: Transcriber) -> None:
        """Raise RequestError for a form of the answer that cannot be."""
        if request.response_format in TIMED:
            form = request.response_format
            if not transcriber.has_times:
                raise RequestError(
                    f"response_format {form} needs times, which this model does not say; use json "
                    "or text",
                    parameter="response_format",
                )
            if request.stream:
                raise RequestError(
                    f"response_format {form} cannot be streamed; use json or text",
                    parameter="response_format",
                )
        if not request.stream:
            for name in ("stream_include_usage", "stream_continuous_usage_stats"):
                if getattr(request, name):
                    raise RequestError(f"{name} needs stream", parameter=name)

    async def _detect(
        self, prompt: Prompt, question: Question, codes: Mapping[int, str], ids: AnswerIds
    ) -> str:
        """Return the code of the language that is spoken. codes: by the tokens that say it."""
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            allowed_token_ids=[*codes],
            extra_args={**question.extra_args} or None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        options = ids.options(0, -1)
        outputs = merge([self._client.generate(prompt, params, options)])
        (output,) = await last_outputs(outputs, 1)
        check_finished(output)
        return codes[output.outputs[0].token_ids[0]]

    def _params(self, request: RecordingFields, question: Question) -> SamplingParams:
        defaults = self._client.default_params()
        given = request.model_dump(include={*SAME}, exclude_none=True)
        max_tokens = lower(request.max_completion_tokens, defaults.get("max_tokens"))
        return SamplingParams(
            **{**defaults, **given, "max_tokens": max_tokens},
            extra_args={**(request.vllm_xargs or {}), **question.extra_args} or None,
            logprobs=0 if request.response_format == "verbose_json" else None,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        )

    def _lines(
        self, outputs: Sequence[RequestOutput], clips: Sequence[Clip], transcriber: Transcriber
    ) -> list[Line]:
        """Return what was said when."""
        decode = self._client.tokenizer().decode
        lines = []
        for output, clip in zip(outputs, clips, strict=True):
            completion = output.outputs[0]
            token_ids = completion.token_ids
            steps = completion.logprobs or ()
            logprobs = [step[token].logprob for token, step in zip(token_ids, steps, strict=False)]
            seconds = len(clip.samples) / transcriber.rate
            for part in transcriber.segments(token_ids, seconds):
                text = decode([*part.token_ids], skip_special_tokens=True)
                start, stop = (clip.start + each for each in (part.start, part.stop))
                scores = logprobs[part.first : part.first + len(part.token_ids)]
                mean = sum(scores) / len(scores) if scores else 0.0
                lines.append(Line(start, stop, text, part.token_ids, mean))
        return lines

    async def _stream(
        self, outputs: Sequence[Any], head: Mapping[str, Any], request: RecordingFields
    ) -> Response:
        """Send the text of the clips in their order."""
        in_order = one_after_the_other(outputs)
        first = await first_of(in_order)
        events = self._events(chain(first, in_order), head, request)
        return EventStream(events, in_order, error_event, end=DONE)

    async def _events(
        self,
        outputs: AsyncGenerator[tuple[int, RequestOutput], None],
        head: Mapping[str, Any],
        request: RecordingFields,
    ) -> AsyncGenerator[bytes, None]:
        usage = Usage(with_details=False)
        async for index, output in outputs:
            completion = output.outputs[0]
            check_finished(output)
            usage.add(index, output)
            choice = {
                "index": 0,
                "delta": {"content": completion.text},
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            event = {**head, "choices": [choice]}
            if request.stream_continuous_usage_stats:
                event["usage"] = usage.total()
            yield event_of(event)
        if request.stream_include_usage:
            yield event_of({**head, "choices": [], "usage": usage.total()})


class TranslationRoute(TranscriptionRoute):
    task = "translate"
    prefix = "trsl"
    kind = "translation.chunk"
    fields = TranslationRequest

    def check(self, request: Any, transcriber: Transcriber) -> None:
        if (
            request.to_language is not None
            and language_of(request.to_language, transcriber) != "en"
        ):
            raise RequestError(
                f"to_language: only en is possible, got {request.to_language[:60]!r}",
                parameter="to_language",
            )
        self.check_form(request, transcriber)


def about(clip: Clip, question: Question, transcriber: Transcriber) -> Prompt:
    """Return a prompt with a clip."""
    value = (clip.samples, transcriber.rate)
    source = MediaSource(modality="audio", value=value, path="file")
    return Prompt(token_ids=question.token_ids, add_special_tokens=False, media=(source,))


def language_of(given: str | None, transcriber: Transcriber) -> str | None:
    """Return the code of a language that a client has named by its code or its English name."""
    if given is None:
        return None
    name = given.lower()
    codes = {other: code for code, other in transcriber.languages.items()}
    code = name if name in transcriber.languages else codes.get(name)
    if code is None:
        known = ", ".join(transcriber.languages)
        raise RequestError(
            f"language: {given[:60]!r} is not one that the model knows; it knows {known}",
            parameter="language",
        )
    return code


async def one_after_the_other(
    streams: Sequence[Any],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of each stream, which has the number of its prompt, after those of the
    streams before it. All are computed at once."""
    waiting: dict[int, list[RequestOutput]] = {}
    current = 0
    async with aclosing(merge(streams)) as outputs:
        async for index, output in outputs:
            waiting.setdefault(index, []).append(output)
            while current in waiting:
                ready = waiting.pop(current)
                for each in ready:
                    yield current, each
                if ready[-1].finished:
                    current += 1
                else:
                    break


def duration(seconds: float) -> dict[str, Any]:
    """Return the usage of an answer."""
    return {"type": "duration", "seconds": math.ceil(seconds)}


def event_of(value: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
