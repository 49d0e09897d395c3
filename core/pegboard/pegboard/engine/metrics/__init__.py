"""What the engine measures, and how it reaches the sinks."""
