"""Models with latent attention: DeepSeek-V2, DeepSeek-V3, DeepSeek-V3.2, Kimi Linear, LongCat-Flash and MiniCPM3."""
