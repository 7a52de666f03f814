"""A module whose import fails because of another module."""

import moetrt_has_no_such_module  # noqa: F401
