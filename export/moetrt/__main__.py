"""``python -m moetrt`` is the command ``moetrt``."""

from moetrt.cli import main

if __name__ == "__main__":
    main()
