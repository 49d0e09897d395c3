"""Usage: MODEL. Forget the prefix cache while requests run."""

import sys

from vllm import EngineArgs, LLMEngine, SamplingParams

engine = LLMEngine.from_engine_args(EngineArgs(model=sys.argv[1]))
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
for name in ("a", "b"):
    engine.add_request(name, "The quick brown fox", params)
texts = {}
steps = 0
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            texts[output.request_id] = output.outputs[0].text
    steps += 1
    if steps == 4:
        print("reset:", engine.reset_prefix_cache(reset_running_requests=True))
assert texts["a"] == texts["b"]
