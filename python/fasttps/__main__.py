"""`python -m fasttps` is the `fasttps` command."""

import sys

from fasttps.cli import main

if __name__ == "__main__":
    sys.exit(main())
