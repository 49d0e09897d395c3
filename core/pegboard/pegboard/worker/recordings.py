"""The recordings of one model's stages, and which of them serves a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from torch import Tensor

from pegboard.config.schema import RecordingMode
from pegboard.errors import CannotRecord, ConfigError, NoRoom
from pegboard.interfaces.platform import Recording, Replay, Trait
from pegboard.worker.step_inputs import NOT_PADDED, InputBuilder, StepInputs

Run: TypeAlias = Callable[..., tuple[Tensor, ...]]
Outside: TypeAlias = Callable[[Callable[..., Tensor], int], Callable[..., Tensor]]
"""See `PiecewiseReplay.outside`."""
WHOLE: Mapping[RecordingMode, Sequence[Trait]] = {
    "full": ("forward", "verify", "decode", "logits"),
    "full_decode_only": ("verify", "decode", "logits"),
    "full_and_piecewise": ("verify", "decode", "logits"),
    "piecewise": ("logits",),
}
"""Mode → the traits that are recorded whole."""


def mode_of(wanted: RecordingMode | None, replay: Any) -> tuple[Sequence[Trait], Outside | None]:
    """Return the traits to record whole, and what records "forward" in pieces, or None. Raises
    ConfigError."""
    outside = getattr(replay, "outside", None)
    mode = wanted or ("full" if outside is None else "full_and_piecewise")
    if "piecewise" not in mode:
        return WHOLE[mode], None
    if outside is None:
        raise ConfigError(
            f"recording_mode {mode}: this platform records steps with their attention; use full or "
            "full_decode_only"
        )
    return WHOLE[mode], outside


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording for steps of at most num_rows rows and num_tokens tokens. padded: the rows and
    tokens that they are padded to."""

    recording: Recording
    num_rows: int
    num_tokens: int
    padded: tuple[int, int]


class Recordings:
    """inputs: of all steps. traits: the stages to record. max_drafts: of a row. by_trait: trait and
    whether rows have adapters → recordings, the smallest first. eager: see `Declared`."""

    def __init__(
        self,
        inputs: InputBuilder,
        traits: Sequence[Trait],
        max_drafts: int,
        eager: Collection[Any] = (),
    ) -> None:
        self._inputs = inputs
        self._eager = eager
        self._tokens_per_row = 1 + max_drafts
        self.traits = [trait for trait in traits if trait != "verify" or max_drafts]
        self.by_trait: dict[tuple[Trait, bool], list[Recorded]] = {}
        self._refusals = dict[str, list[str]]()

    def record(
        self,
        replay: Replay,
        runs: Mapping[Trait, tuple[Run, Sequence[Tensor]]],
        with_adapters: Sequence[bool],
        plan: Callable[[StepInputs], None] | None,
        unrecorded: Callable[[Trait], str],
    ) -> None:
        """Record what can be recorded. runs: each stage, and the buffers that it reads. plan: gives
        a step to the attention backends; None = they are called outside of the recordings.
        unrecorded: why attention cannot be recorded in a stage. Errors of the model itself are
        raised."""
        inputs = self._inputs
        refusals = self._refusals
        traits = [trait for trait in self.traits if trait in runs]
        for trait, inputs.has_adapters in product(traits, with_adapters):
            run, buffers = runs[trait]
            name = f"{trait} with adapters" if inputs.has_adapters else trait
            recordings: list[Recorded] = []
            no_room: NoRoom | None = None
            try:
                for num_rows, size in reversed(self._sizes(trait, replay)):
                    if trait != "logits":
                        if reason := unrecorded(trait):
                            raise CannotRecord(reason)
                        if plan is not None:
                            plan(inputs.blank(num_rows, size))
                    try:
                        recording = replay.record(run, [buffer[:size] for buffer in buffers])
                    except NoRoom as refusal:
                        no_room = refusal
                        continue  # small sizes serve most steps
                    is_padded = replay.pads and plan is not None
                    padded = (num_rows, size) if is_padded else NOT_PADDED
                    recordings.insert(0, Recorded(recording, num_rows, size, padded))
            except CannotRecord as refusal:
                refusals.setdefault(str(refusal), []).append(name)
            if no_room is not None:
                if recordings:
                    name += f" of more than {recordings[-1].num_tokens} tokens"
                refusals.setdefault(str(no_room), []).append(name)
            self.by_trait[trait, inputs.has_adapters] = recordings
        inputs.has_adapters = False

    def reasons(self) -> list[str]:
        """Return the reasons why some traits run eagerly."""
        return [
            f"{', '.join(names)} run eagerly: {reason}" for reason, names in self._refusals.items()
        ]

    def _sizes(self, trait: Trait, replay: Replay) -> list[tuple[int, int]]:
        """Return the numbers of rows and of tokens to record, in ascending order."""
        max_rows = self._inputs.max_rows
        per_row = self._tokens_per_row if trait == "verify" else 1
        largest = self._inputs.max_tokens
        if trait != "forward":
            largest = min(max_rows * per_row, largest)
        sizes = replay.sizes(trait, largest)
        if replay.pads:
            whole = {size // per_row for size in sizes} - {0}
            return [(min(count, max_rows), count * per_row) for count in sorted(whole)]
        if trait == "decode" and self.find("verify", max_rows) is not None:
            return []  # a recording serves any rows, so this one serves decodes too
        return [(max_rows, size) for size in sizes]

    def find(self, trait: Trait, num_tokens: int, num_rows: int = 0) -> Recorded | None:
        """Return the smallest recording for at least so many tokens and rows."""
        if self._eager and self._inputs.has_adapters:
            return None
        for recorded in self.by_trait.get((trait, self._inputs.has_adapters), ()):
            if num_tokens <= recorded.num_tokens and num_rows <= recorded.num_rows:
                return recorded
        return None

    def find_whole(self, num_rows: int, num_tokens: int) -> Recorded | None:
        """Return the recording of a step whose tokens all need logits. Steps in which few rows have
        drafts are computed like one token for each row, instead of mostly padding."""
        decode = self.find("decode", num_tokens)
        if num_tokens == num_rows and decode is not None:
            return decode
        verify = self.find("verify", num_tokens, num_rows)
        if verify is None or (decode is not None and 2 * num_tokens < verify.num_tokens):
            return decode
        return verify
