"""The engine's metrics, and how they reach the sinks."""
