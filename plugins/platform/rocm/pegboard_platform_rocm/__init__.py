"""AMD GPUs as a platform."""
