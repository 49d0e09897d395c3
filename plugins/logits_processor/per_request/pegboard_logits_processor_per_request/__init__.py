"""A logits processor that calls a function of the user for each request."""
