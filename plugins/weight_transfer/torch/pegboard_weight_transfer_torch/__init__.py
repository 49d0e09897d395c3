"""The weight transfer `torch`: new weights from a trainer, with torch's process groups."""

__version__ = "0.1.0"
