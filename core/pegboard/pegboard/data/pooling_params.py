"""PoolingParams: how a prompt becomes one vector. Field names, defaults and ranges are vLLM's."""

from __future__ import annotations

import msgspec

from pegboard.errors import RequestError


class PoolingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The vector of a prompt is the last token's hidden state after the final norm.

    truncate_prompt_tokens: the number of last tokens to keep; -1 keeps max_model_len. dimensions: keep only the first ones, for
    models trained so (Matryoshka); the rest is normalized. use_activation: divide the vector by its Euclidean length; None = as
    the model declares, else yes. Raises RequestError for a wrong value.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("truncate_prompt_tokens", -1), ("dimensions", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not least <= value < 2**31 or value == 0):
                expected = "at least 1" + (", or -1 for max_model_len" if least < 0 else "")
                raise RequestError(f"{name} must be an integer of {expected}, got {value!r:.60}", parameter=name)
        if self.use_activation is not None and type(self.use_activation) is not bool:
            raise RequestError(
                f"use_activation must be true or false, got {self.use_activation!r:.60}", parameter="use_activation"
            )
