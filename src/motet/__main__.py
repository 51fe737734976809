"""`python -m motet`: the command line, where no script `motet` is installed."""

import sys

from motet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
