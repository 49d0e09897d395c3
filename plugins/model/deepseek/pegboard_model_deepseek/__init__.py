"""Models with latent attention: DeepSeek-V2, V3 and V3.2, Kimi Linear, LongCat-Flash, MiniCPM3 and
openPangu-Ultra-MoE."""
