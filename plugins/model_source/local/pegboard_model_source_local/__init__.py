"""Model sources for models on disk (`local`) and models shipped inside Python wheels (`pypi`)."""
