"""Jaxprs: traced with inner calls inlined, sliced by what depends on what."""
