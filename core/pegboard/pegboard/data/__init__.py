"""Values that cross process borders (parameters, requests, batches, step outputs), and the outputs
that a user gets."""
