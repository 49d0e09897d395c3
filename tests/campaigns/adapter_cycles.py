"""A campaign: LoRA adapters are loaded, used and unloaded over HTTP, again and again. The memory of
the server must stay flat.

    python tests/campaigns/adapter_cycles.py --count 1000

Each cycle gives one of a few adapters a new name, asks it for a few tokens, and unloads it. Several
clients do that at the same time, with more adapters than slots. Right is: every answer is the
adapter's own, and at the end the server knows no adapter and uses no block.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

import damaged_checkpoints
import httpx
from server_process import PATIENCE_S, Server, install_probe

RANK = 64
NUM_ADAPTERS = 5
NUM_CLIENTS = 3
FLAGS = (
    "--max-loras",
    "2",
    "--max-cpu-loras",
    "4",
    "--max-lora-rank",
    str(RANK),
    "--plugins-enable",
    "api:lora_admin",
    "--dtype",
    "float32",
    "--max-model-len",
    "64",
    "--kv-cache-memory-bytes",
    "4194304",
    "--max-num-seqs",
    "8",
)


def write_adapters(folder: Path) -> list[Path]:
    """Write random adapters of all linear layers of the small model. Each has about a quarter of a
    MiB."""
    import torch
    from safetensors.torch import save_file

    hidden = damaged_checkpoints.HIDDEN
    inner = damaged_checkpoints.INNER
    kv = damaged_checkpoints.HEAD_DIM * 2
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = []
    for number in range(NUM_ADAPTERS):
        chance = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(damaged_checkpoints.LAYERS):
            for module, (rows, columns) in shapes.items():
                name = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=chance)
                tensors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=chance)
        target = folder / f"adapter{number}"
        target.mkdir(parents=True)
        save_file(tensors, target / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": RANK,
            "target_modules": "all-linear",
        }
        (target / "adapter_config.json").write_text(json.dumps(config))
        found.append(target)
    return found


class Cycles:
    """Runs cycles against a server. wrong: what went wrong."""

    def __init__(self, http: httpx.AsyncClient, adapters: Sequence[Path]) -> None:
        self.http = http
        self.adapters = adapters
        self.texts: dict[Path, str] = {}
        self.wrong: list[str] = []
        self._numbers = count()

    async def run(self, num_cycles: int) -> None:
        """Run this many cycles."""
        last = next(self._numbers) + num_cycles

        async def client() -> None:
            while (number := next(self._numbers)) <= last and len(self.wrong) < 5:
                await self._cycle(f"cycle{number}", self.adapters[number % len(self.adapters)])

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    async def _cycle(self, name: str, folder: Path) -> None:
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        answer = await self._post(
            "/v1/completions",
            {
                "model": name,
                "prompt": "the river",
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
            },
        )
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})
        text = answer["choices"][0]["text"] if answer else ""
        if self.texts.setdefault(folder, text) != text:
            self.wrong.append(f"{name}: {text!r} and not {self.texts[folder]!r}")

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self.http.post(path, json=body)
        if answer.status_code != 200:
            self.wrong.append(f"{path} {body}: {answer.status_code} {answer.text}")
            return None
        return answer.json() if path == "/v1/completions" else answer.text


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


async def campaign(
    server: Server, adapters: Sequence[Path], num_cycles: int, step: int, told: Callable[..., None]
) -> list[str]:
    """Return what was wrong. told: gets the number of cycles so far, and the MiB of the API process
    and of the engine."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        cycles = Cycles(http, adapters)
        for done in range(0, num_cycles + 1, step):
            told(done, resident(server.process.pid), resident(server.engine_pid()))
            if done < num_cycles:
                await cycles.run(step)
        left = (await http.get("/probe/list_loras")).json()
        names = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
    if left or len(names) != 1:
        cycles.wrong.append(f"adapters are left: {left}, {names}")
    if len(set(cycles.texts.values())) != len(adapters):
        cycles.wrong.append(f"adapters give the same text: {cycles.texts}")
    await asyncio.to_thread(server.wait_until_idle)
    return cycles.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="cycles")
    parser.add_argument(
        "--step", type=int, default=100, help="cycles between two lines of the table"
    )
    arguments = parser.parse_args()
    print("| cycles | API process, MiB | engine, MiB |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        damaged_checkpoints.write_healthy(folder / "model")
        adapters = write_adapters(folder / "adapters")
        with Server(
            folder / "model", folder, *FLAGS, probe=install_probe(folder / "site")
        ) as server:
            wrong = asyncio.run(
                campaign(
                    server.wait_until_ready(),
                    adapters,
                    arguments.count,
                    arguments.step,
                    lambda done, api, engine: print(
                        f"| {done} | {api:.0f} | {engine:.0f} |", flush=True
                    ),
                )
            )
    for text in wrong:
        print(f"bad: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
