"""How a command refuses: in an error without a traceback."""


class Unfit(ValueError):
    """Arguments that are well formed and still do not fit."""
