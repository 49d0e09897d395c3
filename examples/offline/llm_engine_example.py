"""The loop below `LLM`: requests are added while others run, each call of `step` computes once, and
one request is aborted.

python examples/offline/llm_engine_example.py [--model MODEL]
"""

import argparse

from pegboard import LLM, SamplingParams

REQUESTS = [
    ("A robot may not injure a human being", SamplingParams(temperature=0, logprobs=1)),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95)),
]


def run(llm: LLM) -> None:
    engine = llm.llm_engine
    waiting = list(enumerate(REQUESTS))
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, (prompt, params) = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
        for output in engine.step():
            if output.finished:
                texts = [completion.text for completion in output.outputs]
                print(f"request {output.request_id}: {texts}")
    engine.add_request("long", "Once upon a time", SamplingParams(max_tokens=500))
    engine.step()
    engine.abort_request(["long"])
    print("unfinished:", engine.get_num_unfinished_requests())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
