"""The arguments of a call: variables, mini-batches, losses, selections."""
