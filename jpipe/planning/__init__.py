"""What to decide before a pipeline is built: profiles, cuts, plans.

Nothing here is needed by a step, so nothing here is imported by one.
"""
