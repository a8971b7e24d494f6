"""Functions as pipelines: traced, cut and lowered for each signature."""
