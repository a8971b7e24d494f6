"""A schedule and its stages written as a list of instructions."""
