"""Samples tokens: see `pegboard.ops.sampling.sample_tokens`."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from pegboard_kernel_cpu.library import Library, library
from pegboard_kernel_cpu.structures import SampleTokens


class _Calls(threading.local):
    """The buffers of one thread's calls. They are allocated once and reused in every step."""

    def __init__(self) -> None:
        self.scratch = torch.empty(0, 0)
        self.arguments = SampleTokens()
        self.library: Library | None = None

    def prepare(self, library: Library, vocabulary: int) -> SampleTokens:
        """Return the arguments. Their scratch memory has room for a selection from `vocabulary`
        logits on each thread of the library's team."""
        if library is not self.library:
            self.library, self.instructions = (
                library,
                library.instructions([("sample_tokens", self.arguments)]),
            )
        needed = -(-(2 * vocabulary + vocabulary // 64 + 64) // 16) * 16
        if self.scratch.shape[0] < library.num_threads or self.scratch.shape[1] < needed:
            self.scratch = torch.empty(library.num_threads, needed)
            self.arguments.scratch, self.arguments.scratch_stride = (
                self.scratch.data_ptr(),
                self.scratch.stride(0),
            )
        return self.arguments


_calls = _Calls()


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor | None = None,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """The same as the reference. Logits are float32."""
    team = library()
    (rows, vocabulary) = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty(rows, dtype=torch.int64)
    arguments = _calls.prepare(team, vocabulary)
    arguments.logits = logits.data_ptr()
    arguments.stride = logits.stride(0)
    arguments.rows = rows
    arguments.vocabulary = vocabulary
    arguments.ids = ids.data_ptr()
    arguments.uniforms = None if uniforms is None else uniforms.data_ptr()
    arguments.temperature = None if temperature is None else temperature.data_ptr()
    arguments.min_p = None if min_p is None else min_p.data_ptr()
    arguments.top_k = None if top_k is None else top_k.data_ptr()
    arguments.top_p = None if top_p is None else top_p.data_ptr()
    team.run(_calls.instructions, 1, rows)
    return ids
