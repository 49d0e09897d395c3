"""Settings: their schema, where they come from, and the resolved form that the engine runs on."""
