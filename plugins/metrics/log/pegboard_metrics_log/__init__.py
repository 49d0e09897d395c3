"""A metrics sink that writes one line with throughput and load every few seconds."""
