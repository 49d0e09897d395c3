"""What a request changes in the server's metrics, which Prometheus scrapes.

pegboard serve
python examples/online/prometheus_metrics.py
"""

import argparse

import httpx
from prometheus_client.parser import text_string_to_metric_families


def samples_of(url: str) -> dict[str, float]:
    """Return the sums of all series by name."""
    text = httpx.get(f"{url}/metrics").raise_for_status().text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url
    before = samples_of(url)
    body = {"prompt": "San Francisco is a", "max_tokens": 8, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    for name, value in samples_of(url).items():
        if name.startswith("vllm:") and value != before.get(name, 0):
            print(f"{name}: +{value - before.get(name, 0):.6g}")


if __name__ == "__main__":
    main()
