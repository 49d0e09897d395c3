"""Ops of a token with several vectors between layers, see `pegboard_models.streams`."""

from __future__ import annotations

from torch import Tensor

from pegboard_kernel_cpu.structures import AddToStreams, CutGates, MatchMagnitude, Streams
from pegboard_kernel_cpu.values import Call, new, rows_of, submit
from pegboard_models.streams import LEAST_MAGNITUDE


def predict_streams(streams: Tensor, routed: Tensor, router: Tensor, mixing: Tensor) -> Tensor:
    """streams [T, N·H], routed [T, H], router [N, H], mixing [N·N, N] → [T, N·H]."""
    return _update(streams, {"routed": routed}, router, mixing, 0)


def correct_streams(
    streams: Tensor, computed: Tensor, routed: Tensor, router: Tensor, mixing: Tensor, active: int
) -> Tensor:
    """streams [T, N·H], computed, routed [T, H], router [N, H], mixing [N, N] → [T, N·H]."""
    return _update(streams, {"computed": computed, "routed": routed}, router, mixing, active)


def _update(
    streams: Tensor, rows: dict[str, Tensor], router: Tensor, mixing: Tensor, active: int
) -> Tensor:
    count, columns = router.shape
    out = new(streams, count * columns)
    arguments = Streams(
        router=router.data_ptr(),
        mixing=mixing.data_ptr(),
        streams=count,
        columns=columns,
        active=active,
    )
    reads = {name: rows_of(value) for name, value in {"x": streams, **rows}.items()}
    submit(streams, Call("update_streams", arguments, reads, {"out": out}, (router, mixing)))
    return out


def add_to_streams(streams: Tensor, x: Tensor) -> Tensor:
    """streams [T, N·H], x [T, H] → [T, N·H]."""
    columns = x.shape[1]
    out = new(streams, streams.shape[1])
    arguments = AddToStreams(streams=streams.shape[1] // columns, columns=columns)
    reads = {"x": rows_of(streams), "y": rows_of(x)}
    submit(streams, Call("add_to_streams", arguments, reads, {"out": out}))
    return out


def match_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """x, like [T, H] → [T, H]."""
    out = new(x, x.shape[1])
    arguments = MatchMagnitude(columns=x.shape[1], least=LEAST_MAGNITUDE)
    reads = {"x": rows_of(x), "like": rows_of(like)}
    submit(x, Call("match_magnitude", arguments, reads, {"out": out}))
    return out


def cut_gates(x: Tensor, cutoff: float) -> Tensor:
    """[T, 2F] → [T, 2F]."""
    out = new(x, x.shape[1])
    arguments = CutGates(columns=x.shape[1] // 2, cutoff=cutoff)
    submit(x, Call("cut_gates", arguments, {"x": rows_of(x)}, {"out": out}))
    return out
