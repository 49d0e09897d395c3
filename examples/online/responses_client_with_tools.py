"""A function call with the Responses API, and its result in the next request.

pegboard serve
python examples/online/responses_client_with_tools.py
"""

import argparse
import json

from openai import OpenAI

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Dallas", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    items = [{"role": "user", "content": "What is the weather in Oslo?"}]
    fields = {"model": model, "tools": [TOOL], "temperature": 0, "max_output_tokens": 60}
    answer = client.responses.create(
        input=items, tool_choice="required", parallel_tool_calls=False, **fields
    )
    call = next(item for item in answer.output if item.type == "function_call")
    print("call:", call.name, call.arguments)
    result = f"It is 5 degrees in {json.loads(call.arguments)['city']}."
    items += [
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": result},
    ]
    answer = client.responses.create(input=items, tool_choice="none", **fields)
    print("answer:", answer.output_text)


if __name__ == "__main__":
    main()
