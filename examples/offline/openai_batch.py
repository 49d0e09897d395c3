"""A file in OpenAI's batch format is answered by `pegboard run-batch`: each line names its route,
so chats and completions stand in one file.

python examples/offline/openai_batch.py [--model MODEL] FOLDER
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
BODIES = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}),
    ("/v1/completions", {"prompt": "Two and two are", "max_tokens": 8, "temperature": 0}),
    ("/v1/completions", {"prompt": "Wrong", "max_tokens": -1}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("folder", type=Path)
    words = parser.parse_args()
    source = words.folder / "requests.jsonl"
    target = words.folder / "answers.jsonl"
    requests = [
        {"custom_id": f"{number}", "method": "POST", "url": url, "body": {"model": "m", **body}}
        for number, (url, body) in enumerate(BODIES, 1)
    ]
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    command = [sys.executable, "-m", "pegboard", "run-batch"]
    command += [words.model] if words.model else []
    files = ["-i", str(source), "-o", str(target), "--served-model-name", "m"]
    subprocess.run([*command, *files], check=True)
    for line in target.read_text().splitlines():
        answer = json.loads(line)
        response = answer["response"]
        shown = response["body"].get("choices") if response["body"] else None
        print(answer["custom_id"], response["status_code"], shown or answer["error"])


if __name__ == "__main__":
    main()
