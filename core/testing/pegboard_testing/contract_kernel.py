"""Contract tests of kernels that compute an op: they give what its reference gives. Weight formats
have `contract_float_weight`, and sampling has `contract_sample_tokens`. A plugin's test file:

class TestMyNorm(KernelContract):
    op = "rms_norm"

    def kernel(self) -> Callable[..., Any]:
        return rms_norm

An op that a plugin declares, or one that is not in `CASES`, needs `cases` and `reference` too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.ops import OPS

Arguments = tuple[Any, ...]
Draw = Callable[..., Tensor]
"""(*shape) → normal numbers in the type of the activations."""


def _norm(draw: Draw, size: int, rows: Sequence[int]) -> Arguments:
    return draw(*rows, size) * 3, draw(size), 1e-5


def _add_norm(draw: Draw, size: int, rows: Sequence[int]) -> Arguments:
    return draw(*rows, size), draw(*rows, size), draw(size), 1e-5


def _layer_norm(draw: Draw, size: int, rows: Sequence[int]) -> Arguments:
    return draw(*rows, size), draw(size), draw(size) if size % 3 else None, 1e-5


def _add_layer_norm(draw: Draw, size: int, rows: Sequence[int]) -> Arguments:
    return draw(*rows, size), *_layer_norm(draw, size, rows)


def _gated(draw: Draw, size: int, rows: Sequence[int]) -> Arguments:
    return (draw(*rows, 2 * size),)


def _rope(draw: Draw, size: int, rows: Sequence[int]) -> Arguments:
    num_tokens = rows[0]
    angles = draw(num_tokens, size // 4).float()
    return draw(num_tokens, 3, size), angles.cos(), angles.sin(), size % 8 == 0


CASES: dict[str, Callable[[Draw, int, Sequence[int]], Arguments]] = {
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "layer_norm": _layer_norm,
    "add_layer_norm": _add_layer_norm,
    "silu_mul": _gated,
    "gelu_tanh_mul": _gated,
    "rope": _rope,
}
"""Op → its arguments for a size and a number of rows."""

SIZES = (4, 12, 64, 1000)
ROWS: tuple[tuple[int, ...], ...] = ((0,), (1,), (7,), (33,))


class KernelContract:
    """Every kernel of an op passes these. Override `op` and `kernel`. dtypes: of activations, that
    the spec supports. device: where the tensors of the tests are."""

    op: str
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    device = "cpu"

    def kernel(self) -> Callable[..., Any]:
        """Return the function of the plugin."""
        raise AssertionError("override KernelContract.kernel")

    def reference(self) -> Callable[..., Any]:
        """Return the function that defines the op."""
        return OPS[self.op]

    def cases(self, draw: Draw) -> Iterator[Arguments]:
        """Yield arguments of the op, among them no rows and one row."""
        for size in SIZES:
            for rows in ROWS:
                yield CASES[self.op](draw, size, rows)

    def draw(self, dtype: torch.dtype) -> Draw:
        """Return what makes numbers of a type. They are the same in every run."""
        generator = torch.Generator().manual_seed(0)
        return lambda *shape: torch.randn(shape, generator=generator).to(dtype).to(self.device)

    def all_cases(self) -> Iterator[Arguments]:
        for dtype in self.dtypes:
            yield from self.cases(self.draw(dtype))

    def test_it_has_the_parameters_of_the_reference(self) -> None:
        expected = list(inspect.signature(self.reference()).parameters)
        names = list(inspect.signature(self.kernel()).parameters)
        assert names == expected, f"layers call it by position: {names}, expected {expected}"

    def test_it_gives_what_the_reference_gives(self) -> None:
        """And it changes those arguments that the reference changes, in the same way."""
        for arguments in self.all_cases():
            given = _copy(arguments)
            others = _copy(arguments)
            result = self.kernel()(*given)
            expected = self.reference()(*others)
            self.compare(result, expected, "the result")
            for index, (one, other) in enumerate(zip(given, others, strict=True)):
                self.compare(one, other, f"argument {index} afterwards")

    def test_rows_inside_wider_rows(self) -> None:
        """Layers pass parts of tensors, such as the heads of q among those of k and v."""
        for arguments in self.all_cases():
            parts = tuple(
                _inside(each) if index == 0 else each for index, each in enumerate(_copy(arguments))
            )
            expected = self.reference()(*_copy(arguments))
            self.compare(self.kernel()(*parts), expected, "the result")

    def test_results_stay_as_they_are(self) -> None:
        """The next call does not write where the first one's result is."""
        for arguments in self.all_cases():
            first = self.kernel()(*_copy(arguments))
            before = _copy(first if isinstance(first, tuple) else (first,))
            self.kernel()(*(-each if _is_float(each) else each for each in _copy(arguments)))
            for one, other in zip(
                first if isinstance(first, tuple) else (first,), before, strict=True
            ):
                assert torch.equal(one, other)

    @staticmethod
    def compare(result: Any, expected: Any, what: str) -> None:
        """Compare results with the tolerance of their type."""
        if isinstance(expected, tuple):
            assert len(result) == len(expected), f"{what}: {len(result)} parts"
            for one, other in zip(result, expected, strict=True):
                KernelContract.compare(one, other, what)
        elif isinstance(expected, Tensor):
            message = f"{what}: {tuple(expected.shape)} {expected.dtype}"
            assert result.dtype == expected.dtype, f"{message}, found {result.dtype}"
            torch.testing.assert_close(
                result.cpu(), expected.cpu(), msg=lambda text: f"{message}\n{text}"
            )


def _copy(arguments: Sequence[Any]) -> Arguments:
    return tuple(each.clone() if isinstance(each, Tensor) else each for each in arguments)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _inside(x: Tensor) -> Tensor:
    """Return a tensor with the same numbers, whose rows are parts of wider rows."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype)
    part = wide.to(x.device)[..., : x.shape[-1]]
    part.copy_(x)
    return part
