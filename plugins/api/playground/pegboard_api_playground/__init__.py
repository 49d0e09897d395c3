"""A page in the browser to chat with the served model, as a plugin of Pegboard."""
