"""One process computes prompts, another one answers. They share a folder with blocks of the KV
cache.

python examples/offline/disaggregated_prefill.py [--model MODEL] FOLDER
"""

import argparse
import multiprocessing

from pegboard import LLM, SamplingParams

TEXT = "A paged KV cache is a table of blocks, and each holds the keys of sixteen tokens. " * 6
PROMPTS = [TEXT + end for end in ("In short,", "This means that", "Therefore,")]


def engine(model: str | None, folder: str, role: str) -> LLM:
    transfer = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return LLM(model, kv_transfer_config=transfer)


def prefill(model: str | None, folder: str) -> None:
    with engine(model, folder, "kv_producer") as llm:
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    print("prefill: the blocks are in the folder", flush=True)


def decode(model: str | None, folder: str) -> None:
    with engine(model, folder, "kv_consumer") as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            tokens = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens loaded"
            print(f"decode: {tokens}: {output.outputs[0].text!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("folder")
    words = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for task in (prefill, decode):
        process = context.Process(target=task, args=(words.model, words.folder))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{task.__name__} failed")


if __name__ == "__main__":
    main()
