"""The executor `ray`: every rank is an actor of Ray."""
