"""The Responses API: a whole answer, a stream, and a question about the answer before, which the
server has stored.

pegboard serve
python examples/online/responses_client.py
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    fields = {"model": model, "temperature": 0, "max_output_tokens": 24}
    first = client.responses.create(input="Name three colors.", **fields)
    print("first:", first.output_text)
    second = client.responses.create(
        input="And now three fruits.", previous_response_id=first.id, **fields
    )
    print("second:", second.output_text)
    with client.responses.stream(input="Name three colors.", **fields) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
