"""Training: the gradients of a mini-batch, and an update where the weights are."""
