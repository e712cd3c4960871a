"""`python -m midair.up.successor`: what a manager becomes when it is upgraded (succession.py).

Older and newer managers start it by this name, so it is where releases meet: `--check` says whether
this release could take over, by its exit code and a line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from midair import names
from midair.errors import MidairError
from midair.exits import Exit
from midair.up import command, succession


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="midair-manager")
    parser.add_argument("--name", metavar="INSTANCE", required=True)
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(argv)
    handed = succession.take_handed()
    try:
        instance = names.check_instance(args.name)
        if args.check:
            command.rehearse(instance)
        elif handed is None:
            raise MidairError("is started by a manager that is upgraded: midair upgrade manager")
        else:
            command.succeed(instance, handed)
    except MidairError as error:
        print(f"midair: {error}", file=sys.stderr)
        return error.code
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
