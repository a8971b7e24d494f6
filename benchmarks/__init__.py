"""Measurements of jpipe, and the page that they fill."""
