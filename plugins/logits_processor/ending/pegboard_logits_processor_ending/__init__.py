"""Logits processor `ending`: the end becomes likelier when few tokens are left."""
