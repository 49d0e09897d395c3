"""Makes a logits processor of Pegboard from a class in vLLM's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import ConfigError
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_vllm_compat.dense_batch import DenseBatch
from pegboard_vllm_compat.logits_interface import AddedRequest, BatchUpdate
from pegboard_vllm_compat.targets import load

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class VllmProcessor:
    """Implements `pegboard.interfaces.logits_processor.LogitsProcessor`. A subclass says which
    class it adapts (`target`). Requests without logits in a step have zeros. Raises ConfigError
    with speculative decoding, which vLLM does not combine with such classes either."""

    target: ClassVar[str]
    base_model: ClassVar[str] = ""
    shadow: ClassVar[bool] = False
    host_tokens = True

    def __init__(self, options: None, setup: LogitsProcessorSetup) -> None:
        import torch

        if setup.limits.max_drafts:
            raise ConfigError(f"{self.target} cannot be combined with speculative decoding")
        self._processor = load(self.target, shadow=self.shadow)(
            vllm_config(setup, self.base_model), torch.device(setup.device), False
        )
        self.argmax_invariant = bool(self._processor.is_argmax_invariant())
        self._batch = DenseBatch()
        self._outputs: dict[int, list[int]] = {}
        self._gone: list[int] = []
        self._new: dict[int, AddedRow] = {}

    def update(self, added: Sequence[AddedRow], removed: "np.ndarray") -> None:
        """See `LogitsProcessor.update`."""
        for row in removed.tolist():
            self._outputs.pop(row, None)
            self._new.pop(row, None)
            self._gone.append(row)
        for each in added:
            self._outputs[each.row] = each.outputs.tolist()
            self._new[each.row] = each

    def apply(
        self,
        logits: "Tensor",
        rows: "Tensor",
        depth: "Tensor",
        drafts: Callable[[], list[list[int]]],
    ) -> "Tensor":
        """See `LogitsProcessor.apply`."""
        self._processor.update_state(self._update())
        places = [self._batch.index[row] for row in rows.tolist()]
        if places == list(range(len(self._batch))):
            whole = self._processor.apply(logits)
            return logits if whole is logits else logits.copy_(whole)
        whole = logits.new_zeros(len(self._batch), logits.shape[1])
        whole[places] = logits
        return logits.copy_(self._processor.apply(whole)[places])

    def _update(self) -> BatchUpdate | None:
        """Return what has changed since the last step."""
        if not self._gone and not self._new:
            return None
        removed, places, moved = self._batch.change(self._gone, self._new)
        added: list[AddedRequest] = [
            (place, each.params, each.prompt.tolist(), self._outputs[each.row])
            for place, each in zip(places, self._new.values(), strict=True)
        ]
        self._gone = []
        self._new = {}
        return BatchUpdate(len(self._batch), removed, added, moved)

    def extend(self, rows: "np.ndarray", token_ids: Sequence[Sequence[int]]) -> None:
        """See `LogitsProcessor.extend`."""
        for row, tokens in zip(rows.tolist(), token_ids, strict=True):
            if row in self._outputs:
                self._outputs[row] += tokens


def vllm_config(setup: LogitsProcessorSetup, base_model: str) -> Any:
    """Return the parts of vLLM's configuration that are known here. base_model: the model as the
    user named it."""
    limits = setup.limits
    model = SimpleNamespace(
        model=base_model,
        tokenizer=base_model,
        max_model_len=limits.max_model_len,
        get_vocab_size=lambda: limits.vocab_size,
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
