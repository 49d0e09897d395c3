"""An IO processor: any data in, any data out. This one sorts texts by how near they are to a
question.

python examples/offline/io_processor.py [--model MODEL]
"""

import argparse
from collections.abc import Sequence
from typing import Any

from pegboard import LLM, PoolingParams
from pegboard.data.output import RequestOutput
from pegboard.errors import RequestError
from pegboard.interfaces.api import Prompt

DATA = {
    "question": "What is the capital of France?",
    "texts": ["It rains in Oslo.", "Paris is the capital of France.", "A fjord is an inlet."],
}


class Nearest:
    plugin = "io_processor:nearest"

    def __init__(self, options: None, setup: Any) -> None:
        pass

    def prompts(self, data: Any) -> list[tuple[Prompt, PoolingParams]]:
        if not isinstance(data, dict) or data.keys() != DATA.keys():
            raise RequestError("data: expected a question and texts", parameter="data")
        texts = [data["question"], *data["texts"]]
        return [(Prompt(text=text), PoolingParams(task="embed")) for text in texts]

    def answer(self, data: Any, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        question, *others = [output.pooled() for output in outputs]
        scores = [float(question @ other) for other in others]
        pairs = sorted(zip(scores, data["texts"], strict=True), reverse=True)
        return [{"text": text, "score": score} for score, text in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    settings = {"runner": "pooling", "io_processor_plugin": "nearest"}
    with LLM(parser.parse_args().model, plugin_files=[__file__], **settings) as llm:
        (output,) = llm.encode({"data": DATA}, use_tqdm=False)
        for item in output.outputs.data:
            print(f"{item['score']:.3f} {item['text']}")


if __name__ == "__main__":
    main()
