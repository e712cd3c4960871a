"""`python -m tests.storm`: see docs/storms.md."""

from __future__ import annotations

import argparse
import sys

from tests.storm.storm import CLIENTS, COMPONENTS, Options, StormError, storm


def names_of(allowed: tuple[str, ...]) -> object:
    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return found

    return read


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.storm", description="Kills parts of an instance under load."
    )
    add = parser.add_argument
    add("--kills", type=int, default=1000, help="how many (default 1000)")
    add("--seed", type=int, default=1, help="of all choices (default 1)")
    add("--minutes", type=float, default=60.0, help="end after this time at the latest")
    add("--connmgrs", type=int, default=2, help="connection managers (default 2)")
    add("--components", type=names_of(COMPONENTS), default=COMPONENTS)  # type: ignore[arg-type]
    add("--clients", type=names_of(CLIENTS), default=CLIENTS)  # type: ignore[arg-type]
    add("--no-upgrades", action="store_true", help="only kills")
    add("--forgive-accept", action="store_true", help="count clients turned away, go on")
    add("--standby", action="store_true", help="with [manager] standby = true")
    args = parser.parse_args()
    options = Options(
        kills=args.kills,
        seed=args.seed,
        minutes=args.minutes,
        connmgrs=args.connmgrs,
        components=args.components,
        clients=args.clients,
        upgrades=not args.no_upgrades,
        forgive_accept=args.forgive_accept,
        extra_config="standby = true\n" if args.standby else "",
    )
    try:
        report = storm(options, lambda line: print(f"storm: {line}", flush=True))
    except StormError as error:
        print(f"storm: FAILED: {error}", file=sys.stderr)
        return 1
    print(f"storm: passed, seed {options.seed}: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
