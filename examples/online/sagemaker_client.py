"""The two routes that SageMaker calls: `/ping` says whether the server is well, and `/invocations`
takes a chat or a completion.

pegboard serve
python examples/online/sagemaker_client.py
"""

import argparse

import httpx

BODIES = [
    {"messages": [{"role": "user", "content": "Name a color."}], "max_tokens": 8},
    {"prompt": "Two and two are", "max_tokens": 8},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url
    print("ping:", httpx.get(f"{url}/ping").status_code)
    for body in BODIES:
        answer = httpx.post(f"{url}/invocations", json=body, timeout=60).raise_for_status().json()
        print(f"{answer['object']}: {answer['choices'][0]}")


if __name__ == "__main__":
    main()
