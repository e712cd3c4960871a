"""`python -m midair.keeper`: how every manager, older and newer ones too, starts the keeper."""

import sys

from midair.keeper.main import main

if __name__ == "__main__":
    sys.exit(main())
