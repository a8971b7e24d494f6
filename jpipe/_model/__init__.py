"""A list of layers, or one module, as functions of variables and a micro-batch."""
