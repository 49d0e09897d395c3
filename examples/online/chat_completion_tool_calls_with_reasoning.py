"""A tool call after reasoning. A forced call is constrained only where the reasoning ends; a switch
of the chat template turns the reasoning off.

pegboard serve Qwen/Qwen3-0.6B
python examples/online/chat_completion_tool_calls_with_reasoning.py
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
    for thinks in (True, False):
        answer = client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=80,
            extra_body={"chat_template_kwargs": {"enable_thinking": thinks}},
        )
        message = answer.choices[0].message
        print("reasoning:", message.reasoning)
        for call in message.tool_calls or ():
            print("call:", call.function.name, call.function.arguments)


if __name__ == "__main__":
    main()
