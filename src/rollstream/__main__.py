"""`python -m rollstream COMMAND …`, the same as `rollstream COMMAND …`."""

import sys

from rollstream.cli import main

if __name__ == "__main__":
    sys.exit(main())
