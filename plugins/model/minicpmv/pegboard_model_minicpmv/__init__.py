"""MiniCPM-V and MiniCPM-o: language models that read images and video, and hear speech."""
