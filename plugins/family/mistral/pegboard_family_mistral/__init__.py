"""Mistral: tool calls behind a control token, reasoning between control tokens."""
