"""Which examples values are made of, and how: what micro-batches would change."""
