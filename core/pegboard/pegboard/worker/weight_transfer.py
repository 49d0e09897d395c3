"""Weights that a trainer in another process sends fill the layers as those of a checkpoint do."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pegboard.config.data_parallel import engine_number
from pegboard.errors import EngineDeadError, ModelError, RequestError, brief, expect
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry, WantedWeight, WeightPiece
from pegboard.interfaces.weight_transfer import SentTensor, WeightTransfer, WeightTransferSetup
from pegboard.plan.weight_update import FLOATS
from pegboard.worker.loaded_model import INCOMPLETE, LoadedModel
from pegboard.worker.model_loader import check_tensors, fill_from, wanted_of
from pegboard.worker.parts import WorkerSetup

LISTS = ("names", "dtype_names", "shapes")
"""The values of an update that say which tensors come. All others are for the plugin."""

UPDATE = Path("the update")
"""What errors call the source of the weights."""


class WeightReceiver:
    """Fills a model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    @cached_property
    def transfer(self) -> WeightTransfer:
        """The plugin's object. Raises RequestError if none is configured, PluginError."""
        return make_transfer(self.loaded.setup)

    def connect(self, info: Mapping[str, Any]) -> None:
        """Connect to the trainer. Raises RequestError, ModelError."""
        self.transfer.init(info)

    def has(self, received: str) -> bool:
        """Return whether the model has the weights of this name, all of them."""
        return self.loaded.received == received

    def restore(self) -> None:
        """Read the last checkpoint again. Raises EngineDeadError if that cannot be read."""
        restore(self.loaded)

    def check(self, info: Mapping[str, Any]) -> list[SentTensor]:
        """Return the tensors that will come. Raises RequestError or ModelError if the model cannot
        be filled with them. Nothing has changed then."""
        assert self.transfer, "without a plugin, the call has raised an error"
        tensors = sent_tensors(info)
        loaded = self.loaded
        check_tensors(loaded.declared, _checkpoint(loaded.checkpoint, tensors))
        wanted = wanted_of(loaded.declared)
        for tensor in tensors:
            before = loaded.checkpoint.tensors.get(tensor.name)
            is_converted = before is None or before.stored in FLOATS
            expected = before.stored if before is not None else "a float type"
            is_right = tensor.dtype in FLOATS if is_converted else tensor.dtype == expected
            if tensor.name in wanted and not is_right:
                raise ModelError(
                    f"{loaded.checkpoint.path} has {tensor.name} as {expected}, and the trainer "
                    f"would send {tensor.dtype}; send the type of the checkpoint"
                )
        return tensors

    def receive(self, info: Mapping[str, Any], digest: str) -> None:
        """Fill the model. digest: a name of these weights that no others have. Raises as `check`
        does, and ModelError if not everything comes, or has values that are not finite. If
        `LoadedModel.received` is INCOMPLETE then, `restore` must follow."""
        tensors = self.check(info)
        loaded = self.loaded
        rest = {name: value for name, value in info.items() if name not in LISTS}
        wanted = wanted_of(loaded.declared)
        transfer = self.transfer
        received = expect(transfer.receive(tensors, rest), Generator, transfer, "receive")
        with closing(received):
            fill_from(
                loaded.declared,
                self._pieces(tensors, received, wanted),
                str(UPDATE),
                only_finite=True,
            )
        loaded.received = digest

    def _pieces(
        self,
        tensors: Iterable[SentTensor],
        received: Iterator[Tensor],
        wanted: Mapping[str, WantedWeight],
    ) -> Iterator[WeightPiece]:
        """Yield what has come of the tensors that are wanted. Raises ModelError if it is something
        else."""
        for tensor in tensors:
            data = next(received, None)
            if data is None:
                raise ModelError(f"the trainer has not sent {tensor.name}; send all tensors")
            shape = tuple(data.shape)
            dtype = str(data.dtype).removeprefix("torch.")
            if (shape, dtype) != (tensor.shape, tensor.dtype):
                raise ModelError(
                    f"{tensor.name} came as {dtype} {list(shape)}; the update said {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
            if tensor.name in wanted:
                self.loaded.received = INCOMPLETE
                yield WeightPiece(tensor.name, dtype, shape, data)

    def close(self) -> None:
        """Close the plugin."""
        if "transfer" in vars(self):
            self.transfer.close()


def call_receiver(worker: Any, call: str, *arguments: object) -> object:
    """Call a method of the worker's `WeightReceiver`, which is made for the first call."""
    if worker.balance is not None and call == "receive":
        worker.balance.restore()
    if "receiver" not in vars(worker):
        worker.receiver = WeightReceiver(worker.models[0])
    return getattr(worker.receiver, call)(*arguments)


def restore(loaded: LoadedModel) -> None:
    """Read the last checkpoint again. Raises EngineDeadError if that cannot be read."""
    try:
        loaded.load()
    except Exception as error:
        raise EngineDeadError(
            f"the weights are incomplete, and {loaded.checkpoint.path} cannot be read again: "
            f"{error}"
        ) from error
    loaded.received = ""


def make_transfer(setup: WorkerSetup) -> WeightTransfer:
    """Build the configured plugin. Raises RequestError if there is none, PluginError."""
    config = setup.config
    if config.weight_transfer is None:
        raise RequestError(
            "this engine takes no weights from other processes; start it with "
            """--weight-transfer-config '{"backend": NAME}'"""
        )
    entry = setup.registry.choose("weight_transfer", Need(), explicit=config.weight_transfer)
    place = setup.place
    transfer_setup = WeightTransferSetup(
        setup.device.name,
        engine_number(config) * place.ranks + place.rank,
        config.data_parallel_size * place.ranks,
    )
    transfer: WeightTransfer = setup.registry.build(entry.require(), transfer_setup)
    return transfer


def sent_tensors(info: Mapping[str, Any]) -> list[SentTensor]:
    """Return the tensors that an update lists: `names`, `dtype_names` and `shapes`, of equal
    length. Raises RequestError."""
    names, types, shapes = (info.get(key) for key in LISTS)
    if not all(isinstance(each, list | tuple) for each in (names, types, shapes)):
        raise _wrong(f"expected the lists {', '.join(LISTS)}, got {brief(sorted(map(str, info)))}")
    if not names:
        raise _wrong("names is empty; send every tensor of the model")
    lengths = [len(each) for each in (names, types, shapes)]  # type: ignore[arg-type]
    if len(set(lengths)) > 1:
        raise _wrong(f"{', '.join(LISTS)} have {lengths} items; expected equally many")
    tensors = []
    for name, dtype, shape in zip(names, types, shapes, strict=True):  # type: ignore[arg-type]
        is_type = isinstance(dtype, str) and isinstance(
            getattr(torch, dtype.removeprefix("torch."), None), torch.dtype
        )
        is_shape = isinstance(shape, list | tuple) and all(
            type(size) is int and size >= 0 for size in shape
        )
        if not (isinstance(name, str) and is_type and is_shape):
            raise _wrong(
                f"a tensor has the name {brief(name)}, the type {brief(dtype)} and the shape "
                f"{brief(shape)}; expected a text, a type such as 'bfloat16', and a list of sizes"
            )
        tensors.append(SentTensor(name, dtype.removeprefix("torch."), tuple(shape)))
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise _wrong("names has a name twice; send each tensor once")
    return tensors


def _wrong(what: str) -> RequestError:
    return RequestError(f"update_info: {what}", parameter="update_info")


def _checkpoint(loaded: Checkpoint, tensors: Iterable[SentTensor]) -> Checkpoint:
    """Return the description of a checkpoint that has these tensors."""
    entries = {
        tensor.name: TensorEntry(tensor.name, tensor.shape, tensor.dtype, "", 0, 0)
        for tensor in tensors
    }
    return replace(loaded, path=UPDATE, tensors=entries)
