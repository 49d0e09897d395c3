"""Outputs that follow a choice, a regular expression, a JSON schema or a grammar.

python examples/offline/structured_outputs.py [--model MODEL]
"""

import argparse

from pegboard import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "brand": {"type": "string", "maxLength": 12},
        "kind": {"type": "string", "enum": ["sedan", "SUV", "truck"]},
    },
    "required": ["brand", "kind"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= "SELECT " column " FROM " table
column ::= "name" | "email"
table ::= "users" | "orders"
"""
TASKS = {
    "Is pegboard great fun? Positive or negative:": {"choice": ["Positive", "Negative"]},
    "Write an email address of Alan Turing:": {"regex": r"[a-z]{3,8}\.[a-z]{3,8}@enigma\.com"},
    "Describe a famous car of the 1990s as JSON:": {"json": SCHEMA},
    "Write SQL that reads names of users:": {"grammar": GRAMMAR},
}


def run(llm: LLM) -> None:
    params = [
        SamplingParams(
            temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(**rule)
        )
        for rule in TASKS.values()
    ]
    conversations = [[{"role": "user", "content": task}] for task in TASKS]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    for rule, output in zip(TASKS.values(), outputs, strict=True):
        print(f"{next(iter(rule))}: {output.outputs[0].text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
