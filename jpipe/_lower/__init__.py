"""A schedule and stages, lowered to a graph: prologue, actions, epilogue."""
