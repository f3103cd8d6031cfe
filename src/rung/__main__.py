"""`python -m rung` is the command `rung`."""

import sys

from rung.cli import main

if __name__ == "__main__":
    sys.exit(main())
