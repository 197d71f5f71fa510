"""`python -m penstock`, for where the console script is not on the PATH."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main())
