"""The command `run-batch`: a file of requests in, a file of answers out."""
