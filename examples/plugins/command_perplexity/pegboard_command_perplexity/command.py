"""`pegboard perplexity MODEL --file FILE`. It takes every flag of the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.errors import UsageError
from pegboard.interfaces.command import CommandSetup

if TYPE_CHECKING:
    from pegboard import LLM


class Perplexity:
    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard perplexity", description="Print the perplexity of a text under a model."
        )
        self._parser.add_settings("engine", "plugins")
        self._parser.add_argument(
            "--file", required=True, type=Path, help="file with the text, UTF-8"
        )
        self._parser.add_argument(
            "--json", action="store_true", dest="as_json", help="machine-readable output"
        )

    def run(self, words: Sequence[str]) -> int:
        settings, arguments = self._parser.parse_settings(words)
        try:
            text = arguments.file.read_text("utf-8")
        except (OSError, UnicodeError) as error:
            raise UsageError(f"--file {arguments.file} cannot be read: {error}") from error
        from pegboard import LLM  # after the flags are checked, because it takes longer

        with LLM.from_settings(settings) as llm:
            logprobs = logprobs_of(llm, text)
        if not logprobs:
            raise UsageError(f"--file {arguments.file}: the text needs at least two tokens")
        perplexity = math.exp(-math.fsum(logprobs) / len(logprobs))
        if arguments.as_json:
            print(json.dumps({"perplexity": perplexity, "num_tokens": len(logprobs)}))
        else:
            print(f"{perplexity:.4f}  ({len(logprobs)} tokens)")
        return 0


def logprobs_of(llm: LLM, text: str) -> list[float]:
    """Return the log-probability of every token that has one before it in its piece."""
    from pegboard import SamplingParams

    token_ids = llm.get_tokenizer().encode(text)
    size = llm.llm_engine.plan.max_model_len - 1  # the engine makes one token, which is not used
    pieces = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    logprobs = []
    for output in llm.generate(
        [{"prompt_token_ids": piece} for piece in pieces if len(piece) > 1], params, use_tqdm=False
    ):
        assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
        for token, known in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            if known is not None:  # the first token has nothing before it
                logprobs.append(known[token].logprob)
    return logprobs
