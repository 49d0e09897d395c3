"""Usage: MODEL. Print everything that was measured."""

import sys

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = LLM(model=sys.argv[1], disable_log_stats=False)
llm.generate(["Hello", "The capital"], SamplingParams(temperature=0.8, max_tokens=3))
names = set()
for metric in llm.get_metrics():
    names.add(metric.name)
    if isinstance(metric, Gauge):
        print(f"{metric.name} (gauge) = {metric.value}")
    elif isinstance(metric, Counter):
        print(f"{metric.name} (counter) = {metric.value}")
    elif isinstance(metric, Vector):
        print(f"{metric.name} (vector) = {metric.values}")
    elif isinstance(metric, Histogram):
        print(f"{metric.name} (histogram) sum = {metric.sum}, count = {metric.count}")
        for bucket_le, value in metric.buckets.items():
            assert isinstance(bucket_le, str) and value >= 0
assert {"vllm:generation_tokens", "vllm:num_requests_running"} <= names
