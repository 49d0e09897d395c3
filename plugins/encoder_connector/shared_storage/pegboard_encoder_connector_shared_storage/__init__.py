"""The encoder connector `shared_storage`: rows as files in a folder."""

__version__ = "0.1.0"
