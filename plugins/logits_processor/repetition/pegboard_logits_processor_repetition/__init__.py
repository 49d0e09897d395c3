"""Logits processor `repetition`: an output that repeats itself ends."""
