"""OpenAI's Responses API: items in, items out, answers that are kept for the next turn."""
