"""Draft plugin `ngram`: proposes the tokens that followed the same n-gram earlier in the
request."""
