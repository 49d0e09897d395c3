"""Offline generation: several prompts at once, in this process.

python examples/offline/basic.py
"""

from pegboard import LLM, SamplingParams


def main() -> None:
    llm = LLM()
    params = SamplingParams(temperature=0, max_tokens=24)
    for output in llm.generate(["The capital of France is", "A paged KV cache is"], params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    messages = [{"role": "user", "content": "Name three primary colors."}]
    print(llm.chat(messages, params)[0].outputs[0].text)


if __name__ == "__main__":
    main()
