"""The process border: messages, the engine process, and the clients' ends of it."""
