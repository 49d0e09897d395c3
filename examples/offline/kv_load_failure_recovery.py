"""What happens when blocks of the KV cache cannot be loaded: they are computed again, or the
request fails. Here the files of the blocks are damaged.

python examples/offline/kv_load_failure_recovery.py [--model MODEL] FOLDER
"""

import argparse
from pathlib import Path

from pegboard import LLM, SamplingParams

PROMPT = "A paged KV cache is a table of blocks of sixteen tokens. " * 6


def answer(model: str | None, folder: Path, policy: str) -> str:
    transfer = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        "kv_load_failure_policy": policy,
    }
    with LLM(model, kv_transfer_config=transfer) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    completion = output.outputs[0]
    return f"{completion.finish_reason} {completion.text!r}"


def damage(folder: Path) -> None:
    """Flip the last byte of every block."""
    for path in folder.rglob("*.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("folder", type=Path)
    words = parser.parse_args()
    print("saved:", answer(words.model, words.folder, "recompute"))
    for policy in ("recompute", "fail"):
        damage(words.folder)
        print(f"damaged, {policy}:", answer(words.model, words.folder, policy))


if __name__ == "__main__":
    main()
