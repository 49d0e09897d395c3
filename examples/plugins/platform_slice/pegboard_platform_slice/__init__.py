"""A part of a CPU as a platform."""
