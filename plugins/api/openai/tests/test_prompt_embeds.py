"""The base64 of `prompt_embeds`: what is read, and bytes that are refused and never run."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import pickle
import threading
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_api_openai import completions
from pegboard_api_openai.completions import read_embeds
from safetensors.torch import save

from pegboard.errors import RequestError

ROWS = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def npy(array: np.ndarray, **how: bool) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **how)
    return buffer.getvalue()


def compressed(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return buffer.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


GROWS = b"\x80\x02cbuiltins\nbytearray\nJ" + (1 << 30).to_bytes(4, "little") + b"\x85R."


def with_pickle(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(ROWS))) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            target.writestr(name, pickled if name.endswith("data.pkl") else source.read(name))
    return buffer.getvalue()


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("must-not-exist",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_form_has_the_same_rows(dtype: torch.dtype) -> None:
    rows = ROWS.to(dtype)
    forms = [save({"x": rows}), saved(rows), saved(rows[None].requires_grad_())]
    if dtype is not torch.bfloat16:
        forms.append(npy(rows.numpy()))
    for embeds in read_embeds([text(form) for form in forms], is_on=True):
        assert embeds.shape == (3, 4) and embeds.dtype == str(dtype).removeprefix("torch.")
        assert torch.frombuffer(bytearray(embeds.data), dtype=dtype).reshape(3, 4).equal(rows)


BAD = {
    "not base64": ("%%%", "expected base64"),
    "nothing": ("", "safetensors file"),
    "foreign bytes": (text(b"GIF89a......"), "safetensors file"),
    "a pickle alone": (text(pickle.dumps(ROWS.numpy())), "safetensors file"),
    "a pickle that runs": (text(saved(Runs())), "one dense tensor"),
    "a pickle in an array": (
        text(npy(np.array([Runs()], object), allow_pickle=True)),
        "cannot be read",
    ),
    "a compressed archive": (text(compressed(saved(ROWS))), "is compressed"),
    "rows that repeat": (text(saved(torch.zeros(1, 4).expand(10**6, 4))), "strides \\[0, 1\\]"),
    "columns": (text(saved(ROWS.T)), "contiguous"),
    "columns in an array": (text(npy(np.asfortranarray(ROWS.numpy()))), "ascontiguousarray"),
    "a mapping": (text(saved({"x": ROWS})), "one dense tensor"),
    "integers": (text(saved(ROWS.int())), "got 'torch IntStorage'"),
    "one dimension": (text(saved(ROWS[0])), "shape \\[tokens, width\\], got \\[4\\]"),
    "bytes that a pickle makes": (text(with_pickle(GROWS)), "one dense tensor"),
    "more members than a file of torch": (text(b"PK" + b"PK\1\2" * 65), "more than 64 members"),
    "an array larger than its file": (
        text(npy(ROWS.numpy()).replace(b"(3, 4), }      ", b"(999999999, 9),}")),
        "do not fill",
    ),
    "two tensors": (text(save({"x": ROWS, "y": ROWS + 1})), "expected one tensor, got 2"),
    "a short file": (text(save({"x": ROWS})[:-4]), "and 44 bytes follow"),
    "a huge header": (text(b"\xff" * 7 + b"\0{"), "the header has"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bytes_are_refused(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value, words = BAD[name]
    tracemalloc.start()
    with pytest.raises(RequestError, match=words) as caught:
        read_embeds([value], is_on=True)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    assert str(caught.value).startswith("prompt_embeds[0]: ") and not list(tmp_path.iterdir())


def test_off_is_a_400_that_says_so(http: Any) -> None:
    error = http().post("/v1/completions", {"prompt_embeds": text(save({"x": ROWS}))}, 400)["error"]
    assert "--enable-prompt-embeds" in error["message"] and error["param"] == "prompt_embeds"


def test_a_small_body_is_decoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()
    monkeypatch.setattr(
        completions,
        "read_embeds",
        lambda *_, **__: threads.append(threading.current_thread()) or refuse(),
    )

    def refuse() -> None:
        raise RequestError("enough")

    class Http:
        async def body(self) -> bytes:
            return b'{"model": "m", "prompt\\u005fembeds": "AAAA"}'

    client: Any = None
    http: Any = Http()
    with pytest.raises(RequestError, match="enough"):
        asyncio.run(completions.CompletionRoute(client, {}).answer(http))
    assert threads and threads[0] is not threading.main_thread()
