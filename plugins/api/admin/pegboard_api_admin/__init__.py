"""Liveness and operations of a Pegboard server over HTTP."""
