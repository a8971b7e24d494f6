"""A function as one jaxpr, cut in stages: slices of its equations."""
