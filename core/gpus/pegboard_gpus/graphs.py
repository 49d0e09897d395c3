"""Steps recorded as graphs of torch.cuda: CUDA graphs, or HIP graphs in a torch for ROCm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import CannotRecord, NoRoom
from pegboard.interfaces.platform import Trait

MOST_ROWS = 512
STEP = 8
"""Above this number of rows, there is a graph for each of its multiples."""
MOST_TOKENS = 2048
"""Of a step with prompts. In larger ones the device should work longer than the host."""


class GraphReplay:
    """Captures decodes, the verification of drafts and the output head whole, and steps with
    prompts in pieces. All graphs share one pool of memory. What they return, and what the calls
    between pieces are given and return, lies in tensors outside of the pool, which all recordings
    share.

    A graph that returned tensors of the pool would keep them allocated: float32 logits of 35 sizes
    up to 256 rows, with 128,256 tokens, add up to 2.2 GB."""

    pads = True

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: Any = None
        self.graphs: list[Graph] = []
        self.shared: dict[tuple[Any, ...], Tensor] = {}
        self.pieces: list[Any] = []  # of the recording that is being captured
        self.is_capturing = False

    def sizes(self, trait: Trait, largest: int) -> Sequence[int]:
        """Return 1, 2, 4, and then the multiples of 8 up to MOST_ROWS. Steps with prompts have four
        sizes in each power of two, up to MOST_TOKENS, and the multiples of 8 below them."""
        if trait == "forward":
            most = min(largest, MOST_TOKENS)
            powers = [2**exponent for exponent in range(5, MOST_TOKENS.bit_length() - 1)]
            steps = [power + part * power // 4 for power in powers for part in range(4)]
            sizes = [1, 2, 4, *range(STEP, powers[0], STEP), *steps]
        else:
            most = min(largest, MOST_ROWS)
            sizes = [1, 2, 4, *range(STEP, most, STEP)]
        return sorted({size for size in sizes if size < most} | {most})

    def record(self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Graph:
        """See `pegboard.interfaces.platform.Replay`."""
        before = dict(self.shared)
        try:
            return self._capture(run, inputs)
        except torch.OutOfMemoryError as error:
            self.shared = before
            torch.cuda.empty_cache()
            raise NoRoom(str(error).splitlines()[0]) from error

    def outside(self, call: Callable[..., Tensor], width: int) -> Callable[..., Tensor]:
        """See `pegboard.interfaces.platform.PiecewiseReplay`. The model gets a copy of the result,
        because the next call writes to the same memory."""

        def stand_in(*given: Tensor | None) -> Tensor:
            first = given[0]
            assert first is not None
            result = self._shared("result", first, (len(first), width))
            places = [
                None if x is None else self._shared(("given", place), x, x.shape)
                for place, x in enumerate(given)
            ]
            for place, x in zip(places, given, strict=True):
                if place is not None and x is not None:
                    place.copy_(x)
            if self.is_capturing:
                self._end()
                self.pieces.append(Outside(call, places, result))
                self._begin()
            return result.clone()

        return stand_in

    def _capture(self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Graph:
        """Run once, so that kernels are compiled and libraries have their memory, and then capture.
        An error of the model is raised by the first run. All recordings use one stream, because
        cuBLAS and hipBLAS keep a workspace for each."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            results = tuple(
                self._shared(place, computed, computed.shape)
                for place, computed in enumerate(run(*inputs))
            )
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.pieces = []
            self._begin()
            try:
                for result, computed in zip(results, run(*inputs), strict=True):
                    result.copy_(computed)
                self._end()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise CannotRecord(str(error).splitlines()[0]) from error
            finally:
                if self.is_capturing:
                    with contextlib.suppress(RuntimeError):  # it says again that it has failed
                        self._end()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.graphs.append(Graph(self.pieces, results, len(inputs[0])))
        return self.graphs[-1]

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool)
        self.is_capturing = True
        self.pieces.append(Piece(graph))

    def _end(self) -> None:
        self.is_capturing = False
        self.pieces[-1].graph.capture_end()

    def _shared(self, name: Any, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Return memory of this shape, in the tensor's type, which recordings share. The largest
        recording is made first, and each one runs before it is captured, so none is allocated in a
        capture."""
        key = (name, *shape[1:], tensor.dtype)
        if key not in self.shared or len(self.shared[key]) < shape[0]:
            self.shared[key] = tensor.new_zeros(shape)
        return self.shared[key][: shape[0]]

    def reset(self) -> None:
        for graph in self.graphs:
            graph.pieces = []
            graph.results = ()
        self.graphs.clear()
        self.shared.clear()
        self.pieces = []
        self.pool = self.stream = None
        torch.cuda.empty_cache()


class Piece:
    """A captured part of a step."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def __call__(self, num_rows: int) -> None:
        self.graph.replay()


class Outside:
    """A call between two pieces. given, result: what it is given and where its result goes, [rows,
    …]."""

    def __init__(
        self, call: Callable[..., Tensor], given: Sequence[Tensor | None], result: Tensor
    ) -> None:
        self.call = call
        self.given = given
        self.result = result

    def __call__(self, num_rows: int) -> None:
        given = [x if x is None else x[:num_rows] for x in self.given]
        self.result[:num_rows].copy_(self.call(*given))


class Graph:
    """See `pegboard.interfaces.platform.Recording`. The rows that a call between pieces does not
    compute keep what was there, so that they stay numbers."""

    def __init__(
        self, pieces: Sequence[Callable[[int], None]], results: tuple[Tensor, ...], size: int
    ) -> None:
        self.pieces = pieces
        self.results = results
        self.size = size

    def __call__(self, num_rows: int) -> tuple[Tensor, ...]:
        for piece in self.pieces:
            piece(num_rows)
        return tuple(result[:num_rows] for result in self.results)
