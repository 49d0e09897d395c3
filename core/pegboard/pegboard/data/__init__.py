"""What crosses process borders: parameters, requests, batches, step outputs, and what a user gets back."""
