"""The commands of ``python -m jpipe``: what they are given, do, print and write."""
