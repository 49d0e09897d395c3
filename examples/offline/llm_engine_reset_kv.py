"""The prefix cache is reset while requests run. They compute their tokens again, and go on as if
nothing had happened.

python examples/offline/llm_engine_reset_kv.py [--model MODEL]
"""

import argparse

from pegboard import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at"]


def run(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    expected = [output.outputs[0].text for output in outputs]
    engine = llm.llm_engine
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(f"reset-{number}", prompt, params)
    texts = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = output.outputs[0].text
        steps += 1
        if steps == 5:
            print("reset while blocks are in use:", engine.reset_prefix_cache())
            print("reset:", engine.reset_prefix_cache(reset_running_requests=True))
    print("the same texts:", [texts[name] for name in sorted(texts)] == expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
