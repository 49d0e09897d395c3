"""An IO processor that finds named entities."""
