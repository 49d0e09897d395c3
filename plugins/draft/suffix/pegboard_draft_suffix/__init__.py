"""Draft plugin `suffix`: proposes what most often followed the same text in the request and in
earlier answers."""
