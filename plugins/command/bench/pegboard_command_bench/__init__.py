"""The command `bench`: latency and throughput of the engine, a load test of a server, and start-up
time."""
