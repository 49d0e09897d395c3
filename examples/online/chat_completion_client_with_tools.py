"""A tool call: the model names a function and its arguments, the client calls it, and sends the
result back. Here the function is named, which works with every model; with a model for tools,
leave `tool_choice` out.

pegboard serve
python examples/online/chat_completion_client_with_tools.py
"""

import argparse
import json

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


def get_weather(city: str, unit: str) -> str:
    return f"It is 85 degrees {unit} in {city}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=[TOOL], tool_choice=named, temperature=0
    )
    message = answer.choices[0].message
    call = message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    result = get_weather(**arguments)
    print("call:", call.function.name, arguments)
    print("result:", result)
    messages = [
        *MESSAGES,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=24
    )
    print("answer:", answer.choices[0].message.content)


if __name__ == "__main__":
    main()
