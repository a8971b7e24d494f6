"""What to decide before a pipeline is built: profiles, cuts, plans.

A step imports the `Plan` that `print(pipe)` shows and `_describe`, which makes it, and
nothing else.
"""
