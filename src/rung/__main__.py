"""`python -m rung` is the command `rung`."""

import sys

from rung.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
