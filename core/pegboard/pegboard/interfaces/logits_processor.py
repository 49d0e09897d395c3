"""Kind `logits_processor` (provisional): users' own changes to logits. Processors form a chain in
the configured order. Runs in A and W."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.config.limits import Limits
    from pegboard.data.sampling_params import SamplingParams
    from pegboard.interfaces.tokenizer import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorSpec(Spec):
    """arguments: the names in `SamplingParams.extra_args` (`vllm_xargs` over HTTP) that it reads. A
    request with a name that no configured processor reads is refused. None = it does not say, so no
    name is refused. validate: "module:function", called in A with the SamplingParams of every
    request. It returns why the `extra_args` are wrong, which becomes the request's error, or None
    if they are right. Its module must not import torch. If `validate` is None, every request is
    accepted.
    flags: "host_tokens" = it reads each new token on the host, which makes the engine
    synchronous."""

    arguments: tuple[str, ...] | None = None
    validate: str | None = None

    FLAGS = frozenset({"host_tokens"})


@dataclass(frozen=True, slots=True)
class LogitsProcessorSetup:
    """vocabulary: reads the vocabulary of the model's tokenizer: the bytes of every token, and
    which tokens are special. It reads files, so call it once and only if it is needed. The model's
    logits may have more columns than the vocabulary has tokens."""

    limits: "Limits"
    device: str
    vocabulary: "Callable[[], Vocabulary]"


class AddedRow(NamedTuple):
    """A row that a request has taken. outputs: not empty if the request resumes."""

    row: int
    params: "SamplingParams"
    prompt: "np.ndarray"
    outputs: "np.ndarray"


class LogitsProcessor(Protocol):
    """One instance per rank. argmax_invariant: True if it never changes which token is the most
    likely one. host_tokens: the same as the spec's flag."""

    argmax_invariant: bool
    host_tokens: bool = False

    def update(self, added: "Sequence[AddedRow]", removed: "np.ndarray") -> None:
        """Tell the processor which rows have changed. Called before `apply`, and only if there are
        changes. The rows in `removed` were freed before those in `added` were taken. A request
        keeps its row."""

    def apply(
        self,
        logits: "Tensor",
        rows: "Tensor",
        depth: "Tensor",
        drafts: "Callable[[], list[list[int]]]",
    ) -> "Tensor":
        """Change logits [N, V] in place. rows[i] is the row that logits row i belongs to, and
        depth[i] is the number of drafts before it. drafts() returns these drafts for every logits
        row; it waits for the device if there are any."""

    def extend(self, rows: "np.ndarray", token_ids: "Sequence[Sequence[int]]") -> None:
        """Take the tokens that each of `rows` [B] got in this step, including accepted drafts.
        Called after each step, and only with `host_tokens`."""
