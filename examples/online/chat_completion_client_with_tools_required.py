"""At least one tool call, of any function, whole and as a stream. The arguments stream as soon as
they are certain.

pegboard serve
python examples/online/chat_completion_client_with_tools_required.py
"""

import argparse

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Dallas", "Oslo", "Lima"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "What is the weather in Dallas, in fahrenheit?"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    fields = {
        "model": model,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    answer = client.chat.completions.create(**fields)
    for call in answer.choices[0].message.tool_calls:
        print("call:", call.function.name, call.function.arguments)
    print("stream: ", end="")
    for chunk in client.chat.completions.create(**fields, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            print(call.function.name or "", call.function.arguments or "", sep="", end="|")
    print()


if __name__ == "__main__":
    main()
