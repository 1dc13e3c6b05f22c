"""Training for real: DDP with unequal local batches, weighted gradients, and measurements on the way. Needs torch."""
