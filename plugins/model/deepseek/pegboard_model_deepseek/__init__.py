"""Models with latent attention: DeepSeek-V2, DeepSeek-V3 and MiniCPM3."""
