"""Measures the effect of computing with quantized weights and activations: perplexity and greedy
choices on text, compared with float32.

    python tests/real_model/quality.py [MODEL] [--tokens 20000] [--setting quantization=rtn_int8 …]

Both sides read the same tokens (teacher forcing): the float side uses weights dequantized to
float32, the other side uses the settings and this machine's kernels. Exit status 1 when a limit is
missed.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import stdev
from typing import Any

from pegboard import LLM, SamplingParams

MAX_PERPLEXITY_CHANGE = 0.005
MIN_AGREEMENT = 0.96
WINDOW = 512
"""Tokens read at once, from an empty context."""
FLOAT: dict[str, Any] = {
    "dtype": "float32",
    "plugin_options": {"quantization.gguf": {"compute": "float"}},
}
MODULES = (
    "statistics random datetime decimal fractions difflib textwrap string heapq functools pathlib "
    "argparse logging subprocess threading tempfile shutil zipfile tarfile csv configparser "
    "calendar locale gettext inspect doctest pickletools optparse imaplib smtplib socketserver "
    "selectors typing"
)
"""Modules of the standard library whose docstrings are the text."""


@dataclass(frozen=True)
class Scores:
    """Returns, for each scored token, its log-probability and the token that greedy sampling would
    have chosen."""

    logprobs: tuple[float, ...]
    choices: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True)
class Comparison:
    """The comparison: num_tokens scored; both perplexities; the share of positions with equal
    greedy choice; the standard error of `change` for this number of scored tokens."""

    num_tokens: int
    exact: float
    found: float
    agreement: float
    error: float

    @property
    def change(self) -> float:
        return self.found / self.exact - 1

    @property
    def is_good(self) -> bool:
        return abs(self.change) <= MAX_PERPLEXITY_CHANGE and self.agreement >= MIN_AGREEMENT

    @property
    def may_be_good(self) -> bool:
        """There are too few tokens to show that a limit is missed."""
        slack = math.sqrt(MIN_AGREEMENT * (1 - MIN_AGREEMENT) / self.num_tokens)
        return (
            abs(self.change) <= MAX_PERPLEXITY_CHANGE + 2 * self.error
            and self.agreement >= MIN_AGREEMENT - 2 * slack
        )

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens: perplexity {self.exact:.4f} → {self.found:.4f} "
            f"({self.change:+.3%} ± {self.error:.3%}, at most {MAX_PERPLEXITY_CHANGE:.1%}), "
            f"same greedy token {self.agreement:.2%} (at least {MIN_AGREEMENT:.0%})"
        )


def docstrings() -> str:
    """Returns prose that exists on every machine."""
    texts = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for name in MODULES.split():
        found = find_spec(name)
        if found is None or found.origin is None:
            continue  # a module that this version of Python does not have
        tree = ast.parse(Path(found.origin).read_text("utf-8"))
        texts += [
            ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)
        ]
    return "\n\n".join(text for text in texts if len(text) > 200)


def windows(llm: LLM, num_tokens: int) -> list[list[int]]:
    ids = llm.get_tokenizer().encode(docstrings(), add_special_tokens=False)[:num_tokens]
    return [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)]


def score(prompts: Sequence[list[int]], llm: LLM) -> Scores:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    logprobs: list[float] = []
    choices: list[int] = []
    for ids, output in zip(prompts, outputs, strict=True):
        for token_id, row in zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
            assert row is not None
            logprobs.append(row[token_id].logprob)
            choices.append(next(choice for choice, entry in row.items() if entry.rank == 1))
    return Scores(tuple(logprobs), tuple(choices))


def compare(model: str, num_tokens: int, **settings: Any) -> Comparison:
    """Compare `model` under `settings` with the same model in float32."""
    return judge(measure(model, num_tokens, **FLOAT), measure(model, num_tokens, **settings))


def measure(model: str, num_tokens: int, **settings: Any) -> Scores:
    base: dict[str, Any] = {
        "max_model_len": WINDOW + 8,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": False,
    }
    with LLM(model, **{**base, **settings}) as llm:
        return score(windows(llm, num_tokens), llm)


def judge(exact: Scores, other: Scores) -> Comparison:
    count = len(exact.choices)
    same = sum(a == b for a, b in zip(exact.choices, other.choices, strict=True))
    losses = [a - b for a, b in zip(exact.logprobs, other.logprobs, strict=True)]
    return Comparison(
        count, exact.perplexity, other.perplexity, same / count, stdev(losses) / math.sqrt(count)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Perplexity and greedy choices, quantized against float32."
    )
    parser.add_argument("model", nargs="?", help="model reference (default: the default model)")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of text")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="setting of the quantized side",
    )
    arguments = parser.parse_args()
    settings = dict(setting.split("=", 1) for setting in arguments.setting)
    result = compare(arguments.model, arguments.tokens, **settings)
    print(result)
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
