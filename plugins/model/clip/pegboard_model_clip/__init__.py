"""CLIP and SigLIP: vectors of texts and images."""
