"""Logits processor `ban`: tokens that the model never says, whatever the request."""
