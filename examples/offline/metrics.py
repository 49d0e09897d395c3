"""Everything that an engine has measured, under vLLM's names: gauges, counters, histograms.

python examples/offline/metrics.py [--model MODEL]
"""

import argparse

from pegboard import LLM, SamplingParams
from pegboard.data.output import Counter, Gauge, Histogram, Vector


def run(llm: LLM) -> None:
    llm.generate(["Hello", "The capital"], SamplingParams(max_tokens=8), use_tqdm=False)
    for metric in llm.get_metrics():
        match metric:
            case Gauge():
                print(f"{metric.name} (gauge) = {metric.value}")
            case Counter():
                print(f"{metric.name} (counter) = {metric.value}")
            case Vector():
                print(f"{metric.name} (vector) = {metric.values}")
            case Histogram():
                print(f"{metric.name} (histogram): sum {metric.sum}, count {metric.count}")
                for limit, value in metric.buckets.items():
                    print(f"    up to {limit}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model, disable_log_stats=False) as llm:
        run(llm)


if __name__ == "__main__":
    main()
