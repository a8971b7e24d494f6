"""Profiles, cuts and plans: all that is decided before a pipeline is built.

A step imports only the `Plan` that `print(pipe)` shows, and `_describe`, which makes
it.
"""
