"""The mini-batch of a step, and where its arrays are."""
