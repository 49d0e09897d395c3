"""A tool call offline, in two turns: the model names a function and its arguments, the program
calls it, and the model answers with the result.

The call is constrained by a JSON schema, so that a small model writes a right one.

python examples/offline/chat_with_tools.py [--model MODEL]
"""

import argparse
import json

from pegboard import LLM, SamplingParams, StructuredOutputsParams

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Dallas", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "temperature", "description": "of a city", "parameters": PARAMETERS},
}
CALL = {
    "type": "object",
    "properties": {"name": {"const": "temperature"}, "arguments": PARAMETERS},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def temperature(city: str) -> str:
    return f"It is {len(city)} degrees in {city}."


def run(llm: LLM) -> None:
    messages = [{"role": "user", "content": "How warm is it in Dallas? Use the tool."}]
    schema = StructuredOutputsParams(json=CALL)
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=schema)
    (output,) = llm.chat(messages, params, tools=[TOOL], use_tqdm=False)
    call = json.loads(output.outputs[0].text)
    result = temperature(**call["arguments"])
    print("call:", call)
    print("result:", result)
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    messages += [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": result},
        {"role": "user", "content": f"So the answer is: {result} Repeat it."},
    ]
    params = SamplingParams(temperature=0, max_tokens=24)
    (output,) = llm.chat(messages, params, tools=[TOOL], use_tqdm=False)
    print("answer:", output.outputs[0].text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
