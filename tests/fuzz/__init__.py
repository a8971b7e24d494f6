"""Random models in random pipelines against the same on one device.

`programs` draws the text of a program of `layers` and `batches`; `check` is what the
program calls; `by_hand` is the model on one device, in plain Flax and optax; `whole` is
the same list as one module, and in a loss function. What `tests.matrix` lists is
checked by the same.
"""
