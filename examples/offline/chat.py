"""A conversation with the model's chat template, then several conversations at once.

python examples/offline/chat.py [--model MODEL]
"""

import argparse

from pegboard import LLM, SamplingParams

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "What is the capital of France?"},
]


def run(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    (output,) = llm.chat(CONVERSATION, params, use_tqdm=False)
    print(output.outputs[0].text)
    questions = ["Name a color.", "Name a fruit.", "Name an animal."]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    for question, output in zip(questions, outputs, strict=True):
        print(f"{question} -> {output.outputs[0].text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
