"""Usage: MODEL. Give a model tools, and its call's result in the next turn."""

import random
import string
import sys

from vllm import LLM
from vllm.sampling_params import SamplingParams

letters = string.ascii_letters + string.digits


def call_id() -> str:
    return "".join(random.choice(letters) for _ in range(9))


def get_current_weather(city: str) -> str:
    return f"It is 30 degrees in {city}"


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
llm = LLM(model=sys.argv[1], tokenizer_mode="auto")
params = SamplingParams(max_tokens=4, temperature=0.0)
messages = [{"role": "user", "content": "What is the weather in Dallas?"}]
outputs = llm.chat(messages, sampling_params=params, tools=tools)
messages.append({"role": "assistant", "content": outputs[0].outputs[0].text.strip() or "?"})
messages.append(
    {"role": "tool", "content": get_current_weather("Dallas"), "tool_call_id": call_id()}
)
outputs = llm.chat(messages, params, tools=tools)
assert "30 degrees" in outputs[0].prompt
print(repr(outputs[0].outputs[0].text))
