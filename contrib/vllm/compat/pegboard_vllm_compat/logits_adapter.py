"""Makes a logits processor of Pegboard from a class in vLLM's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import ConfigError
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_vllm_compat.logits_interface import AddedRequest, BatchUpdate
from pegboard_vllm_compat.targets import load

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class VllmProcessor:
    """Implements `pegboard.interfaces.logits_processor.LogitsProcessor`. A subclass says which
    class it adapts (`target`). The index of a request in vLLM's batch is its row, so nothing ever
    moves, and indices without a request have logits of zeros. Raises ConfigError with speculative
    decoding, which vLLM does not combine with such classes either."""

    target: ClassVar[str]
    shadow: ClassVar[bool] = False
    host_tokens = True

    def __init__(self, options: None, setup: LogitsProcessorSetup) -> None:
        import torch

        if setup.limits.max_drafts:
            raise ConfigError(f"{self.target} cannot be combined with speculative decoding")
        self._processor = load(self.target, shadow=self.shadow)(
            vllm_config(setup), torch.device(setup.device), False
        )
        self.argmax_invariant = bool(self._processor.is_argmax_invariant())
        self._outputs: dict[int, list[int]] = {}
        self._removed: list[int] = []
        self._added: dict[int, AddedRequest] = {}

    def update(self, added: Sequence[AddedRow], removed: "np.ndarray") -> None:
        """See `LogitsProcessor.update`."""
        for row in removed.tolist():
            self._outputs.pop(row, None)
            self._added.pop(row, None)
            self._removed.append(row)
        for row, params, prompt, outputs in added:
            self._outputs[row] = outputs.tolist()
            self._added[row] = (row, params, prompt.tolist(), self._outputs[row])

    def apply(
        self,
        logits: "Tensor",
        rows: "Tensor",
        depth: "Tensor",
        drafts: Callable[[], list[list[int]]],
    ) -> "Tensor":
        """See `LogitsProcessor.apply`."""
        places = rows.tolist()
        size = max([*places, *self._outputs], default=-1) + 1
        update = BatchUpdate(size, self._removed, [*self._added.values()])
        has_changed = bool(self._removed or self._added)
        self._removed = []
        self._added = {}
        self._processor.update_state(update if has_changed else None)
        if places == list(range(size)):
            whole = self._processor.apply(logits)
            return logits if whole is logits else logits.copy_(whole)
        whole = logits.new_zeros(size, logits.shape[1])
        whole[rows] = logits
        return logits.copy_(self._processor.apply(whole)[rows])

    def extend(self, rows: "np.ndarray", token_ids: Sequence[Sequence[int]]) -> None:
        """See `LogitsProcessor.extend`."""
        for row, tokens in zip(rows.tolist(), token_ids, strict=True):
            if row in self._outputs:
                self._outputs[row] += tokens


def vllm_config(setup: LogitsProcessorSetup) -> Any:
    """Return the parts of vLLM's configuration that Pegboard knows of."""
    limits = setup.limits
    model = SimpleNamespace(
        max_model_len=limits.max_model_len, get_vocab_size=lambda: limits.vocab_size
    )
    scheduler = SimpleNamespace(
        max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
    )
    return SimpleNamespace(
        model_config=model,
        scheduler_config=scheduler,
        speculative_config=None,
        device_config=SimpleNamespace(device=setup.device),
    )


def validator(target: str, *, shadow: bool = False) -> Callable[[SamplingParams], str | None]:
    """Return what checks the parameters of a request with the class `target`."""

    def validate(params: SamplingParams) -> str | None:
        try:
            load(target, shadow=shadow).validate_params(params)
        except ValueError as error:
            return str(error)
        return None

    return validate
