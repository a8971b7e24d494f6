"""The handles that users hold, and the checks of their arguments."""
