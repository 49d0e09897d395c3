"""Tool calls that the model chooses to make, in the format of xLAM. A parser reads them from the
answer, whole and as a stream.

pegboard serve Salesforce/xLAM-2-1b-fc-r --tool-call-parser xlam
python examples/online/chat_completion_client_with_tools_xlam.py
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
        "tool_choice": "auto",
        "temperature": 0,
        "max_tokens": 60,
    }
    message = client.chat.completions.create(**fields).choices[0].message
    print("content:", message.content)
    print("calls:", [call.function for call in message.tool_calls or ()])
    content = ""
    calls = ""
    for chunk in client.chat.completions.create(**fields, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            calls += (call.function.name or "") + (call.function.arguments or "")
    print(f"stream: content {content!r}, calls {calls!r}")


if __name__ == "__main__":
    main()
