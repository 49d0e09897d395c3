"""The model source for the Hugging Face Hub."""
