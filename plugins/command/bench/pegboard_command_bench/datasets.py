"""The requests of the measurements: random prompts, with or without images, conversations of a
ShareGPT file, or prompts or recordings of a JSONL file. The seed decides all random choices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pegboard.errors import PegboardError, UsageError
from pegboard_command_bench.media import add_media_flags, random_images

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer

DATASETS = ("random", "random-mm", "sharegpt", "custom", "prefix_repetition")
RERANK = "random-rerank"
"""A dataset for servers whose model pools."""

SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048
SHAREGPT_MIN = 4
"""Limits for the conversations taken from a ShareGPT file, in tokens."""

DEFAULT_OUTPUT_LEN = 256


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a measurement. prompt_len is in tokens of the given tokenizer. parts: images,
    as parts of a message. recording: to be written down. others: more texts of a request to a model
    that pools, such as the documents that the prompt ranks."""

    prompt: str
    prompt_len: int
    output_len: int
    parts: tuple[dict[str, Any], ...] = ()
    recording: Path | None = None
    others: tuple[str, ...] = ()

    @property
    def content(self) -> Any:
        """The content of a message."""
        return [*self.parts, {"type": "text", "text": self.prompt}] if self.parts else self.prompt


def add_dataset_flags(
    parser: argparse.ArgumentParser, *, num_prompts: int = 1000, pools: bool = False
) -> None:
    """Add the flags that choose and shape a dataset. pools: also those for models that pool."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name",
        choices=(*DATASETS, RERANK) if pools else DATASETS,
        default="random",
        help="the requests to send (default %(default)s)",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="sharegpt: JSON; custom: JSONL of {prompt, output_tokens} or {audio: file}",
    )
    group.add_argument(
        "--num-prompts", type="number", default=num_prompts, help="requests (default %(default)s)"
    )
    group.add_argument(
        "--dataset-seed",
        "--data-seed",
        type=int,
        default=0,
        help="seed of the data (default %(default)s)",
    )
    group.add_argument(
        "--disable-shuffle", action="store_true", help="use a file's entries in their order"
    )
    group.add_argument(
        "--no-oversample", action="store_true", help="do not repeat entries to reach --num-prompts"
    )
    group.add_argument(
        "--input-len", type="number", help="tokens per prompt, for the random datasets"
    )
    group.add_argument("--output-len", type="number", help="tokens per output, for every dataset")
    group.add_argument(
        "--random-input-len",
        type="number",
        default=1024,
        help="random: tokens per prompt (default %(default)s)",
    )
    group.add_argument(
        "--random-output-len",
        type="number",
        default=128,
        help="random: tokens per output (default %(default)s)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="random: lengths vary by ± this fraction",
    )
    group.add_argument(
        "--random-prefix-len",
        type="number",
        default=0,
        help="random: tokens that all prompts share at the start",
    )
    group.add_argument(
        "--sharegpt-output-len",
        type="number",
        help="sharegpt: tokens per output (default: as in the file)",
    )
    group.add_argument(
        "--custom-output-len",
        type="number",
        help="custom: tokens per output for entries without a number",
    )
    for name, default in (
        ("prefix-len", 256),
        ("suffix-len", 256),
        ("num-prefixes", 10),
        ("output-len", 128),
    ):
        group.add_argument(
            f"--prefix-repetition-{name}",
            type="number",
            default=default,
            help="prefix_repetition (default %(default)s)",
        )
    add_media_flags(group)
    if pools:
        _add_pooling_flags(group)


def _add_pooling_flags(group: Any) -> None:
    group.add_argument(
        "--random-batch-size",
        type="number",
        default=1,
        help="random, random-rerank: texts per request to a model that pools (default %(default)s)",
    )
    group.add_argument(
        "--no-reranker",
        action="store_true",
        help="random-rerank: the model reads each text alone, as with --backend openai-embeddings",
    )


def make_requests(arguments: Any, tokenizer: "Tokenizer") -> list[BenchRequest]:
    """Returns the requests that the flags describe. Raises UsageError, and PegboardError for a file
    that cannot be used."""
    makers: dict[str, Callable[[Any, Tokenizer, np.random.Generator], list[BenchRequest]]] = {
        "random": _random,
        "random-mm": _random_mm,
        "sharegpt": _sharegpt,
        "custom": _custom,
        "prefix_repetition": _prefix_repetition,
        RERANK: _random_rerank,
    }
    if arguments.num_prompts < 1:
        raise UsageError(f"--num-prompts must be at least 1, got {arguments.num_prompts}")
    rng = np.random.default_rng(arguments.dataset_seed)
    requests = makers[arguments.dataset_name](arguments, tokenizer, rng)[: arguments.num_prompts]
    if not requests:
        raise PegboardError(
            f"dataset {arguments.dataset_name} of {arguments.dataset_path} has no usable request"
        )
    if arguments.no_oversample or requests[0].others:
        return requests
    return [requests[index % len(requests)] for index in range(arguments.num_prompts)]


def random_ids(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Returns random token ids. They are not low ids, which are often control tokens."""
    low = min(1000, vocab_size // 2)
    return [int(token) for token in rng.integers(low, max(low + 1, min(vocab_size, 10_000)), count)]


def _text_of(
    tokenizer: "Tokenizer", ids: Sequence[int], allowed: Sequence[int], rng: np.random.Generator
) -> tuple[str, int]:
    """Returns a text with as many tokens as `ids` in nearly all cases. Decoding and encoding merges
    some tokens, so the text is cut or extended."""
    want = len(ids)
    ids = list(ids)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    for _ in range(10):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == want:
            break
        missing = want - len(ids)
        ids = (
            ids[:want]
            if missing < 0
            else [*ids, *(int(token) for token in rng.choice(allowed, missing))]
        )
        text = tokenizer.decode(ids, skip_special_tokens=True)
    return text, len(tokenizer.encode(text, add_special_tokens=False))


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    if not 0 <= ratio < 1:
        raise UsageError(f"--random-range-ratio must be in [0, 1), got {ratio}")
    low = max(1, int(mean * (1 - ratio)))
    high = max(1, int(np.ceil(mean * (1 + ratio))))
    return [int(value) for value in rng.integers(low, high + 1, count)]


def _ordinary_ids(tokenizer: "Tokenizer") -> list[int]:
    vocabulary = tokenizer.vocabulary()
    return [
        index
        for index, text in enumerate(vocabulary.token_bytes)
        if text and index not in vocabulary.special_token_ids
    ]


def _random(arguments: Any, tokenizer: "Tokenizer", rng: np.random.Generator) -> list[BenchRequest]:
    count = arguments.num_prompts
    allowed = _ordinary_ids(tokenizer)
    inputs = _lengths(
        rng, arguments.input_len or arguments.random_input_len, arguments.random_range_ratio, count
    )
    outputs = _lengths(
        rng,
        arguments.output_len or arguments.random_output_len,
        arguments.random_range_ratio,
        count,
    )
    prefix = [int(token) for token in rng.choice(allowed, arguments.random_prefix_len)]
    requests = []
    for input_len, output_len in zip(inputs, outputs, strict=True):
        ids = [*prefix, *(int(token) for token in rng.choice(allowed, input_len))]
        requests.append(BenchRequest(*_text_of(tokenizer, ids, allowed, rng), output_len))
    return _in_batches(requests, getattr(arguments, "random_batch_size", 1))


def _in_batches(requests: Sequence[BenchRequest], size: int) -> list[BenchRequest]:
    """Join the texts of every `size` requests. Raises UsageError."""
    if size < 1:
        raise UsageError(f"--random-batch-size must be at least 1, got {size}")
    batches = [requests[start : start + size] for start in range(0, len(requests), size)]
    return [
        replace(
            batch[0],
            prompt_len=sum(each.prompt_len for each in batch),
            others=tuple(each.prompt for each in batch[1:]),
        )
        for batch in batches
    ]


def _random_rerank(
    arguments: Any, tokenizer: "Tokenizer", rng: np.random.Generator
) -> list[BenchRequest]:
    """One random query, and batches of random documents. A pair of both has the length that was
    asked for, unless the model reads each text alone."""
    size = arguments.random_batch_size
    count = arguments.num_prompts
    length = arguments.input_len or arguments.random_input_len
    ratio = arguments.random_range_ratio
    is_pair = not arguments.no_reranker
    if not is_pair:  # the query is one of the texts
        size -= 1
        count -= 1
    if min(size, count) < 1:
        raise UsageError(
            "--no-reranker needs a --random-batch-size and --num-prompts of at least 2"
        )
    num_separators = int(is_pair)
    mean = length // 2 - num_separators if is_pair else length
    if mean < 1:
        raise UsageError(f"random-rerank needs a --random-input-len of at least 4, got {length}")
    allowed = _ordinary_ids(tokenizer)

    def text(num_tokens: int) -> tuple[str, int]:
        ids = [int(token) for token in rng.choice(allowed, num_tokens)]
        return _text_of(tokenizer, ids, allowed, rng)

    query, query_len = text(*_lengths(rng, mean, ratio, 1))
    rest = max(1, length - query_len - num_separators) if is_pair else length
    documents = [text(num_tokens) for num_tokens in _lengths(rng, rest, ratio, count)]
    requests = []
    for start in range(0, count, size):
        batch = documents[start : start + size]
        num_query = (query_len + num_separators) * len(batch) if is_pair else query_len
        num_tokens = num_query + sum(num for _, num in batch)
        requests.append(
            BenchRequest(query, num_tokens, 0, others=tuple(document for document, _ in batch))
        )
    return requests


def _random_mm(
    arguments: Any, tokenizer: "Tokenizer", rng: np.random.Generator
) -> list[BenchRequest]:
    """Random prompts with images of random pixels."""
    requests = _random(arguments, tokenizer, rng)
    images = random_images(len(requests), arguments, rng)
    return [replace(request, parts=parts) for request, parts in zip(requests, images, strict=True)]


def _prefix_repetition(
    arguments: Any, tokenizer: "Tokenizer", rng: np.random.Generator
) -> list[BenchRequest]:
    """Prompts in groups that share a prefix, in random order."""
    allowed = _ordinary_ids(tokenizer)
    num_prefixes = max(1, arguments.prefix_repetition_num_prefixes)
    prefixes = [
        list(map(int, rng.choice(allowed, arguments.prefix_repetition_prefix_len)))
        for _ in range(num_prefixes)
    ]
    requests = []
    for index in range(arguments.num_prompts):
        suffix = rng.choice(allowed, arguments.prefix_repetition_suffix_len)
        ids = [*prefixes[index % num_prefixes], *map(int, suffix)]
        output_len = arguments.output_len or arguments.prefix_repetition_output_len
        requests.append(BenchRequest(*_text_of(tokenizer, ids, allowed, rng), output_len))
    if not arguments.disable_shuffle:
        rng.shuffle(requests)
    return requests


def _read(path: str | None, name: str) -> str:
    if path is None:
        raise UsageError(f"--dataset-name {name} needs --dataset-path FILE")
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PegboardError(f"--dataset-path {path}: {error}") from error


def _sharegpt(
    arguments: Any, tokenizer: "Tokenizer", rng: np.random.Generator
) -> list[BenchRequest]:
    """Reads the first two turns of each conversation: the question, and the length of the
    answer."""
    try:
        entries = json.loads(_read(arguments.dataset_path, "sharegpt"))
    except ValueError as error:
        raise PegboardError(
            f"--dataset-path {arguments.dataset_path}is not JSON: {error}"
        ) from error
    turns = list(_two_turns(entries))
    if not arguments.disable_shuffle:
        rng.shuffle(cast(Any, turns))
    requests: list[BenchRequest] = []
    asked_len = arguments.output_len or arguments.sharegpt_output_len
    for prompt, answer in turns:
        if len(requests) == arguments.num_prompts:
            break
        prompt_len = len(tokenizer.encode(prompt, add_special_tokens=True))
        output_len = asked_len or len(tokenizer.encode(answer, add_special_tokens=False))
        fits = prompt_len <= SHAREGPT_MAX_PROMPT and prompt_len + output_len <= SHAREGPT_MAX_TOTAL
        if fits and prompt_len >= SHAREGPT_MIN and (asked_len or output_len >= SHAREGPT_MIN):
            requests.append(BenchRequest(prompt, prompt_len, output_len))
    return requests


def _two_turns(entries: Any) -> Iterator[tuple[str, str]]:
    for entry in entries if isinstance(entries, list) else ():
        turns: list[Any] = (
            entry.get("conversations") or entry.get("conversation") or []
            if isinstance(entry, dict)
            else []
        )
        if len(turns) >= 2 and all(
            isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in turns[:2]
        ):
            yield turns[0]["value"], turns[1]["value"]


def _custom(arguments: Any, tokenizer: "Tokenizer", rng: np.random.Generator) -> list[BenchRequest]:
    lines = [line for line in _read(arguments.dataset_path, "custom").splitlines() if line.strip()]
    if not arguments.disable_shuffle:
        rng.shuffle(lines)
    requests = []
    for line in lines[: arguments.num_prompts]:
        try:
            entry = json.loads(line)
            recording = Path(entry["audio"]).expanduser() if "audio" in entry else None
            prompt = entry["prompt"] if recording is None else entry.get("prompt", "")
        except (ValueError, KeyError, TypeError) as error:
            message = (
                f'--dataset-path {arguments.dataset_path}: expected {{"prompt": …}}, got '
                f"{line[:80]!r}"
            )
            raise PegboardError(message) from error
        given = entry.get("output_tokens")
        output_len = (
            arguments.output_len or given or arguments.custom_output_len or DEFAULT_OUTPUT_LEN
        )
        requests.append(
            BenchRequest(
                prompt,
                len(tokenizer.encode(prompt, add_special_tokens=True)),
                int(output_len),
                recording=recording,
            )
        )
    return requests
