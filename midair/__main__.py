"""`python -m midair`: the midair command."""

import sys

from midair.cli import main

sys.exit(main())
