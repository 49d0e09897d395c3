"""Usage: MODEL FOLDER. Save the weights of each rank, and load them again."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path

from vllm import LLM, EngineArgs, SamplingParams

model, folder = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=4)
llm = LLM(**dataclasses.asdict(EngineArgs(model=model)))
expected = llm.generate("Hello", params)[0].outputs[0].token_ids
Path(folder).mkdir(exist_ok=True)
llm.llm_engine.engine_core.save_sharded_state(path=folder, pattern=None, max_size=5 * 1024**3)
for name in os.listdir(model):
    if os.path.splitext(name)[1] not in (".bin", ".pt", ".safetensors"):
        shutil.copy(os.path.join(model, name), folder)
loaded = LLM(**dataclasses.asdict(EngineArgs(model=folder, load_format="sharded_state")))
assert loaded.generate("Hello", params)[0].outputs[0].token_ids == expected
