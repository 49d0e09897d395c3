"""The command `run-batch`: answers a file of requests with a file of responses."""
