"""Fakes and contract tests that ship with the library."""
