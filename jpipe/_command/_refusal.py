"""How a command refuses: in an error without a traceback."""


class CommandError(ValueError):
    """Arguments that are well formed and still do not fit."""
