"""Pooler plugin `sentence`: vectors or classes of prompts, as sentence-transformers declares."""
