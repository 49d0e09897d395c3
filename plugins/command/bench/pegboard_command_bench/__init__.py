"""The command `bench`: latency and throughput of the engine, load on a server, start-up time."""
