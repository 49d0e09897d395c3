"""Whisper writes down what is said, in both forms of a prompt: with the item, or with a part for
the encoder and one for the decoder.

python examples/offline/encoder_decoder_multimodal.py [--model MODEL]
"""

import argparse

import numpy as np

from pegboard import LLM, SamplingParams

START = "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>"


def tone(seconds: float = 1.0, rate: int = 16_000) -> tuple[np.ndarray, int]:
    """Return a tone of 440 Hz and its rate. A recording is read with `soundfile.read(path)`."""
    times = np.arange(int(seconds * rate)) / rate
    return (0.1 * np.sin(2 * np.pi * 440 * times)).astype(np.float32), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="openai/whisper-small")
    audio = {"audio": tone()}
    prompts = [
        {"prompt": START, "multi_modal_data": audio},
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": audio},
            "decoder_prompt": START,
        },
    ]
    with LLM(parser.parse_args().model) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        for output in llm.generate(prompts, params, use_tqdm=False):
            print(repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
