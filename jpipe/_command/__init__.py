"""The commands of ``python -m jpipe``."""
