"""The models that a server has, and the name that other clients use.

pegboard serve
python examples/online/first_model.py
"""

import argparse

from openai import OpenAI


def first_model(client: OpenAI) -> str:
    """Return the name of the first model."""
    return client.models.list().data[0].id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    print("first model:", first_model(client))
    for model in client.models.list():
        print(model.id)


if __name__ == "__main__":
    main()
