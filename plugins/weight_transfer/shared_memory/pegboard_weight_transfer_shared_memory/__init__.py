"""The weight transfer `shared_memory`: new weights from a trainer on the same machine."""

__version__ = "0.1.0"
