"""Models with latent attention: DeepSeek-V2, DeepSeek-V3, LongCat-Flash and MiniCPM3."""
