"""Usage: MODEL. Answer the lines of a file, in batches."""

import json
import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], max_num_seqs=4, enable_chunked_prefill=True)
params = SamplingParams(temperature=0, max_tokens=3)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "in.jsonl"
    file.write_text("".join(json.dumps({"text": f"Line {i}"}) + "\n" for i in range(10)))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
answers = llm.generate([row["text"] for row in rows], params, use_tqdm=False)
assert [answer.prompt for answer in answers] == [row["text"] for row in rows]
