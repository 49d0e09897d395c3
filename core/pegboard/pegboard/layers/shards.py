"""What each rank holds of a model that several ranks compute: shares of heads and channels, or some
of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.collective import Collective
from pegboard.interfaces.quantization import Cut, Part

Placement = Literal["linear", "round_robin"]

Span = tuple[int, int]
"""[start, stop)."""

UNITS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Shares are multiples of one of these, so that blocks of quantized weights stay whole."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that divide the layers of a model. rank: of this one in the group. collective: None
    if there is one rank, or if nothing is computed (the model is only declared). placement: how the
    ranks share out whole experts, neighbors or in turn; None = each has a share of every expert's
    channels. redundant: how many experts have another copy; whole experts may then move from rank
    to rank. None = they stay. same_keys: as many consecutive ranks must hold the same KV heads."""

    rank: int = 0
    size: int = 1
    collective: Collective | None = None
    placement: Placement | None = None
    redundant: int | None = None
    same_keys: int = 1

    def experts(self, count: int) -> Sequence[int]:
        """Return the experts of which this rank holds channels. Raises ModelError if whole experts
        are shared out, and there are fewer of them than ranks."""
        if not self.shares_out_experts:
            return range(count)
        if self.redundant is not None:
            return self.slots(count)[self.rank]
        neighbors = range(*dealt(count, self.size)[self.rank])
        in_turn = range(self.rank, count, self.size)
        return neighbors if self.placement == "linear" else in_turn

    @property
    def shares_out_experts(self) -> bool:
        return self.placement is not None and self.size > 1

    @property
    def moves_experts(self) -> bool:
        return self.redundant is not None and self.shares_out_experts

    def slots(self, count: int) -> list[list[int]]:
        """Return the experts that each rank holds before the first move. Those that have a copy are
        the first ones, and no rank has two of the same. Raises ModelError if the ranks cannot hold
        equally many."""
        total = count + (self.redundant or 0)
        each, rest = divmod(total, self.size)
        if rest or each > count:
            raise ModelError(
                f"{self.size} ranks cannot hold {count} experts and {self.redundant} redundant "
                f"ones in equally many slots, at most {count} each; set num_redundant_experts of "
                f"eplb_config to a number such as {-count % self.size}"
            )
        if self.placement == "round_robin":
            return [[*range(rank, count, self.size)] for rank in range(self.size)]
        first = range(0, total, each)
        return [[slot % count for slot in range(start, start + each)] for start in first]

    def share(self, count: int) -> Span:
        """Return this rank's part of `count` channels, in the largest of UNITS with which the
        shares are nearly equal. The first ranks hold more if the units cannot be divided equally.
        Raises ModelError if there are fewer channels than ranks."""
        unit = next((unit for unit in UNITS if count % unit == 0 and self._fits(count // unit)), 1)
        return scaled(dealt(count // unit, self.size)[self.rank], unit)

    def _fits(self, num_units: int) -> bool:
        """Return whether the largest share of these units is at most a twentieth over the mean."""
        largest = -(-num_units // self.size)
        return num_units >= self.size and 20 * largest * self.size <= 21 * num_units

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Span, Span]:
        """Return the query heads and the KV heads of this rank. Each rank has whole groups of query
        heads that share a KV head; if there are more ranks than KV heads, several ranks hold the
        same KV head and divide its queries. Raises ModelError if there are too few heads."""
        each = num_heads // num_kv_heads
        if self.size <= num_kv_heads:
            kv_heads = dealt(num_kv_heads, self.size)[self.rank]
            return scaled(kv_heads, each), kv_heads
        # the ranks of each KV head; those of the first heads are fewer, so no rank holds more than
        # the first one
        ends = dealt(self.size, num_kv_heads)
        holders = [(self.size - stop, self.size - start) for start, stop in reversed(ends)]
        kv_head = next(i for i, (_, stop) in enumerate(holders) if self.rank < stop)
        start, stop = holders[kv_head]
        first, last = dealt(each, stop - start)[self.rank - start]
        return (kv_head * each + first, kv_head * each + last), (kv_head, kv_head + 1)

    def attention_heads(self, num_heads: int, num_kv_heads: int) -> tuple[Span, Span]:
        """Return the same for an attention layer. Raises ModelError also if ranks that must hold
        the same KV heads, and as many queries, do not."""
        heads, kv_heads = self.heads(num_heads, num_kv_heads)
        first = self.rank - self.rank % self.same_keys
        for rank in range(first, first + self.same_keys):
            others, others_kv = replace(self, rank=rank).heads(num_heads, num_kv_heads)
            if others_kv != kv_heads or others[1] - others[0] != heads[1] - heads[0]:
                raise ModelError(
                    f"{num_heads} heads with {num_kv_heads} KV heads, divided among {self.size} "
                    f"ranks, do not leave the same KV head and equally many queries to "
                    f"{self.same_keys} ranks; use a smaller decode_context_parallel_size"
                )
        return heads, kv_heads

    def all_rows(self, part: Tensor) -> Tensor:
        """Return the rows of all ranks below each other: [size * T, …]. part: [T, …], those of this
        rank. All have equally many."""
        if self.collective is None:
            return part
        beside = self.collective.all_gather(part.flatten(1).contiguous())
        return beside.view(len(part), self.size, *part.shape[1:]).transpose(0, 1).flatten(0, 1)

    def summed(self, call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `call` plus the results of the other ranks."""
        if (collective := self.collective) is None:
            return call
        add_up = collective.all_reduce
        return lambda x: add_up(call(x))


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the stack of layers. The stages compute a step one after another. number: its place
    among `count` stages."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the output head."""
        return self.number == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return the indices of its layers, nearly as many as other stages have. The first and the
        last stage get one more only if the others have it too, because they have the embedding and
        the head. Raises ModelError if there are fewer layers than stages."""
        if num_layers < self.count:
            raise ModelError(
                f"the model has {num_layers} layers to divide among {self.count} stages; use a "
                "smaller pipeline_parallel_size"
            )
        least, more = divmod(num_layers, self.count)
        counts = [least] * self.count
        middle = [*range(self.count - 2, 0, -1), 0, self.count - 1]
        for number in middle[:more]:
            counts[number] += 1
        start = sum(counts[: self.number])
        return range(start, start + counts[self.number])


def part_of(
    name: str, start: int, shape: tuple[int, int], rows: Span, columns: Span | None = None
) -> Part:
    """Return the part of a merged weight, from its row `start` on, that these rows and columns of a
    checkpoint's matrix fill. columns: None = all."""
    columns = columns or (0, shape[1])
    is_whole = (rows, columns) == ((0, shape[0]), (0, shape[1]))
    cut = None if is_whole else Cut(shape, rows, columns)
    return Part(name, (start, start + rows[1] - rows[0]), cut)


def dealt(count: int, size: int) -> Sequence[Span]:
    """Divide `count` things among `size` ranks as equally as possible, the first ranks getting one
    more. Raises ModelError if there are fewer things than ranks."""
    if count < size:
        raise ModelError(
            f"the model has {count} heads, channels or experts to divide among {size} ranks; use a "
            "smaller tensor_parallel_size"
        )
    least, more = divmod(count, size)
    starts = [rank * least + min(rank, more) for rank in range(size + 1)]
    return list(zip(starts, starts[1:], strict=False))


def stacked(sections: Iterable[tuple[int, Span]]) -> list[Span]:
    """Return what a rank holds of rows that consist of sections below each other. sections: the
    rows of each, and those of them that the rank holds, which may be none."""
    spans: list[Span] = []
    start = 0
    for rows, (first, last) in sections:
        if spans and spans[-1][1] == start + first:
            spans[-1] = spans[-1][0], start + last
        elif first < last:
            spans.append((start + first, start + last))
        start += rows
    return spans


def scaled(span: Span, unit: int) -> Span:
    """Return the span of the things that `span` counts in units."""
    return span[0] * unit, span[1] * unit
