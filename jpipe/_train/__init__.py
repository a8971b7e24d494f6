"""What training adds: the gradient of a mini-batch, and an update where weights are."""
