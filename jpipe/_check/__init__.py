"""Each layer and the loss, run at once and in micro-batches, and compared."""
