"""Mistral: tool calls after a control token, reasoning between control tokens."""
