"""Usage: MODEL. Answers of a given form."""

import json
import re
import sys
from enum import Enum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import StructuredOutputsParams

MAX_TOKENS = 60


class Size(str, Enum):
    small = "small"
    large = "large"


class Car(BaseModel):
    fast: bool
    size: Size


choice = StructuredOutputsParams(choice=["Positive", "Negative"])
regex = StructuredOutputsParams(regex=r"\w{2}@\w{3}\.com\n")
schema = StructuredOutputsParams(json=Car.model_json_schema())
grammar = StructuredOutputsParams(grammar='root ::= "SELECT " column\ncolumn ::= "a" | "b"')


def answer(llm: LLM, prompt: str, form: StructuredOutputsParams, **more: object) -> str:
    params = SamplingParams(structured_outputs=form, max_tokens=MAX_TOKENS, **more)
    return llm.generate(prompt, sampling_params=params)[0].outputs[0].text


def main() -> None:
    config = StructuredOutputsConfig(disable_any_whitespace=True)
    llm = LLM(model=sys.argv[1], max_model_len=200, structured_outputs_config=config)
    assert answer(llm, "Classify: vLLM is wonderful!", choice) in ("Positive", "Negative")
    text = answer(llm, "Write an address", regex, stop=["\n"])
    assert re.fullmatch(r"\w{2}@\w{3}\.com", text), text
    Car.model_validate(json.loads(answer(llm, "Describe a car", schema)))
    assert answer(llm, "Write SQL", grammar) in ("SELECT a", "SELECT b")


if __name__ == "__main__":
    main()
