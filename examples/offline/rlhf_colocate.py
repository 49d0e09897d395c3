"""A trainer and an engine take turns with the same memory: the engine sleeps while the trainer
works, and wakes up in two parts, first with memory for new weights, then with its KV cache.

python examples/offline/rlhf_colocate.py --model FOLDER
"""

import argparse

from pegboard import LLM, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, which a trainer may rewrite")
    model = parser.parse_args().model
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(model, enable_sleep_mode=True) as llm:
        (before,) = llm.generate(PROMPT, params, use_tqdm=False)
        llm.sleep(level=2)
        print("sleeps:", llm.is_sleeping())
        # here the trainer has the memory, and writes its new checkpoint to the folder
        print("serves with weights only:", llm.wake_up(tags=["weights"]))
        print("serves:", llm.wake_up(tags=["kv_cache"]))
        llm.update_weights(model)
        (after,) = llm.generate(PROMPT, params, use_tqdm=False)
    print("the same text:", before.outputs[0].text == after.outputs[0].text)


if __name__ == "__main__":
    main()
