"""A script that ends the process, as nothing that is imported should."""

import sys

sys.exit(3)
