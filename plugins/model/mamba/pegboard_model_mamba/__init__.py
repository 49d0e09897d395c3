"""State-space models, and their hybrids with attention."""
