"""Drawing tokens: see `pegboard.ops.sampling.sample_tokens`."""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.structures import SampleTokens

_scratch = torch.empty(0, 0)


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor | None = None,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """As the reference; logits float32, each row contiguous."""
    global _scratch
    team, (rows, vocabulary) = library(), logits.shape
    needed = -(-(vocabulary + vocabulary // 64 + 64) // 16) * 16
    scratch = _scratch  # held: another thread may replace it by a larger one meanwhile
    if scratch.shape[0] < team.num_threads or scratch.shape[1] < needed:
        scratch = _scratch = torch.empty(team.num_threads, needed)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty(rows, dtype=torch.int64)
    arguments = SampleTokens(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        rows=rows,
        vocabulary=vocabulary,
        ids=ids.data_ptr(),
        scratch=scratch.data_ptr(),
        scratch_stride=scratch.stride(0),
    )
    parameters = {"uniforms": uniforms, "temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    for name, tensor in parameters.items():
        if tensor is not None:
            setattr(arguments, name, tensor.data_ptr())
    team.team_run([("sample_tokens", arguments)], rows)
    return ids
