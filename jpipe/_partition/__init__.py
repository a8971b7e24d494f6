"""The cuts between stages, and the places of stages and parameters."""
