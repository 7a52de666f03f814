"""The errors that moetrt shows its user: one line that names the thing, what it was and what is taken."""


class MoetrtError(Exception):
    """Base of every error that is the user's to mend; the command line prints it without a traceback."""


class InputError(MoetrtError, ValueError):
    """A value, a file or a shape that is not taken."""


class InputTypeError(MoetrtError, TypeError):
    """A dtype or a Python type that is not taken."""
