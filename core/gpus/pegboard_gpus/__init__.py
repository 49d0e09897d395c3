"""What the platforms of GPUs share that torch reaches through torch.cuda."""
