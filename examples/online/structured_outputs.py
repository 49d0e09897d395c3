"""Outputs that follow a choice, a regular expression, a grammar, a JSON schema, a class of
Pydantic, or a schema only between two tags.

pegboard serve
python examples/online/structured_outputs.py
"""

import argparse
from enum import StrEnum

from openai import OpenAI
from pydantic import BaseModel


class Kind(StrEnum):
    sedan = "sedan"
    truck = "truck"


class Car(BaseModel):
    kind: Kind
    year: int


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<car>", "schema": Car.model_json_schema(), "end": "</car>"}],
    "triggers": ["<car>"],
}
GRAMMAR = 'root ::= "SELECT " ("name" | "email") " FROM users"'
RULES = {
    "choice": ["positive", "negative"],
    "regex": r"[a-z]{3,8}@example\.com",
    "grammar": GRAMMAR,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = {"role": "user", "content": "Describe a famous car of the 1990s."}
    fields = {"model": model, "messages": [question], "temperature": 0, "max_tokens": 48}
    for name, rule in RULES.items():
        more = {"structured_outputs": {name: rule}}
        answer = client.chat.completions.create(**fields, extra_body=more)
        print(f"{name}: {answer.choices[0].message.content}")
    schema = {"name": "car", "schema": Car.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    answer = client.chat.completions.create(**fields, response_format=form)
    print("json:", answer.choices[0].message.content)
    result = client.chat.completions.parse(**fields, response_format=Car)
    print("parsed:", repr(result.choices[0].message.parsed))
    answer = client.chat.completions.create(**fields, response_format=TAG)
    print("structural tag:", answer.choices[0].message.content)


if __name__ == "__main__":
    main()
