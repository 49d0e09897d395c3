"""A client without any library of OpenAI: plain HTTP, with a whole answer and a stream of
server-sent events.

pegboard serve
python examples/online/api_client.py
"""

import argparse
import json

import httpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url
    body = {"prompt": "San Francisco is a", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    print(answer["choices"][0]["text"])
    streamed = {**body, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=streamed, timeout=60) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                print(json.loads(data)["choices"][0]["text"], end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
