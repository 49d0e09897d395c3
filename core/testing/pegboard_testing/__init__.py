"""Fakes and contract tests that come with the library."""
