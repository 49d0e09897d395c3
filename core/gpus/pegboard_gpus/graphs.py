"""Steps recorded as graphs of torch.cuda: CUDA graphs, or HIP graphs in a torch for ROCm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import CannotRecord, NoRoom
from pegboard.interfaces.platform import Trait

MOST_ROWS = 512
STEP = 8
"""Above this number of rows, there is a graph for each of its multiples."""


class GraphReplay:
    """Captures decodes, the verification of drafts and the output head. Steps with prompts run
    eagerly. All graphs share one pool of memory and write their results to the same tensors.

    A graph that returned tensors of the pool would keep them allocated: float32 logits of 35 sizes
    up to 256 rows, with 128,256 tokens, add up to 2.2 GB."""

    pads = True

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: Any = None
        self.graphs: list[Graph] = []
        self.results: dict[tuple[Any, ...], Tensor] = {}

    def sizes(self, trait: Trait, largest: int) -> Sequence[int]:
        """Return 1, 2, 4, and then the multiples of 8 up to MOST_ROWS."""
        if trait == "forward":
            return ()
        most = min(largest, MOST_ROWS)
        return sorted(
            {size for size in (1, 2, 4, *range(STEP, most, STEP)) if size < most} | {most}
        )

    def record(self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Graph:
        """See `pegboard.interfaces.platform.Replay`."""
        before = dict(self.results)
        try:
            return self._capture(run, inputs)
        except torch.OutOfMemoryError as error:
            self.results = before
            torch.cuda.empty_cache()
            raise NoRoom(str(error).splitlines()[0]) from error

    def _capture(self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Graph:
        """Run once, so that kernels are compiled and libraries have their memory, and then capture.
        An error of the model is raised by the first run. All recordings use one stream, because
        cuBLAS and hipBLAS keep a workspace for each."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            results = self._results(run(*inputs))
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                for result, computed in zip(results, run(*inputs), strict=True):
                    result.copy_(computed)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotRecord(str(error).splitlines()[0]) from error
        self.graphs.append(Graph(graph, results, len(inputs[0])))
        return self.graphs[-1]

    def _results(self, computed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return tensors of these shapes and types, which recordings share. The largest recording
        is made first."""
        shared = []
        for place, tensor in enumerate(computed):
            key = (place, tensor.shape[1:], tensor.dtype)
            if key not in self.results or len(self.results[key]) < len(tensor):
                self.results[key] = torch.empty_like(tensor)
            shared.append(self.results[key][: len(tensor)])
        return tuple(shared)

    def reset(self) -> None:
        for graph in self.graphs:
            graph.graph = None
            graph.outputs = ()
        self.graphs.clear()
        self.results.clear()
        self.pool = self.stream = None
        torch.cuda.empty_cache()


class Graph:
    """See `pegboard.interfaces.platform.Recording`."""

    def __init__(self, graph: Any, outputs: tuple[Tensor, ...], size: int) -> None:
        self.graph = graph
        self.outputs = outputs
        self.size = size

    def __call__(self, num_rows: int) -> tuple[Tensor, ...]:
        self.graph.replay()
        return tuple(output[:num_rows] for output in self.outputs)
