"""GPTQ checkpoints (Frantar et al. 2022)."""
