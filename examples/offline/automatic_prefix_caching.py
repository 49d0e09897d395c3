"""Two questions about one long table. The second one finds the table's keys and values in the
prefix cache, so only the question is computed.

python examples/offline/automatic_prefix_caching.py [--model MODEL]
"""

import argparse
import time

from pegboard import LLM, SamplingParams

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Fay", "Gus", "Hal"]
CITIES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito", "Delhi", "Bern"]
TABLE = "| name | age | city |\n" + "".join(
    f"| {name} {number} | {20 + number} | {city} |\n"
    for number in range(4)
    for name, city in zip(NAMES, CITIES, strict=True)
)


def run(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    llm.generate("Hello", params, use_tqdm=False)  # the first request of a process takes longer
    for question in ("How old is Ada 3?", "Where does Hal 2 live?"):
        begin = time.perf_counter()
        (output,) = llm.generate(f"{TABLE}\n{question}", params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        print(
            f"{question} {len(output.prompt_token_ids)} prompt tokens, "
            f"{output.num_cached_tokens} of them cached, {1000 * seconds:.0f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model, enable_prefix_caching=True) as llm:
        run(llm)


if __name__ == "__main__":
    main()
