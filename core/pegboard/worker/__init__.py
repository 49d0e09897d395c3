"""One rank: loads the model and turns batches into token ids. Everything here may import torch."""
