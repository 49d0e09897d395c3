"""A question about a recording. A prompt has the model's own marks of audio; over HTTP, the chat
template writes them.

python examples/offline/audio_language.py --model MODEL [--prompt PROMPT]
"""

import argparse

import numpy as np

from pegboard import LLM, SamplingParams

PROMPT = (
    "<|im_start|>user\nAudio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nWhat do you hear?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def tone(seconds: float = 1.0, rate: int = 16_000) -> tuple[np.ndarray, int]:
    """Return a tone of 440 Hz and its rate. A recording is read with `soundfile.read(path)`."""
    times = np.arange(int(seconds * rate)) / rate
    return (0.1 * np.sin(2 * np.pi * 440 * times)).astype(np.float32), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen2-Audio-7B-Instruct")
    parser.add_argument("--prompt", default=PROMPT)
    words = parser.parse_args()
    prompt = {"prompt": words.prompt, "multi_modal_data": {"audio": tone()}}
    with LLM(words.model) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    print(f"{len(output.prompt_token_ids)} prompt tokens: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
