"""Stages as slices of a jaxpr, with their forwards and backwards."""
