"""The `midair` command."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from midair import arguments, config, names
from midair.client import commands as client_commands
from midair.drill import command as drill
from midair.errors import MidairError
from midair.exits import Exit
from midair.fsck import command as fsck
from midair.monitor import commands as look
from midair.trace import commands as trace_commands
from midair.up import ask_reload, ask_upgrade, status, upgrade
from midair.up import command as up
from midair.up.source import Source
from midair.version import __version__

# Packages that stand on this one and add a command to it, if they are installed.
ADDED = ("bench", "spark_jobs")

EXAMPLES = """\
examples:
  midair up                              start here, listen on 127.0.0.1:4222
  midair up --port 0 --name second      a second instance, on any free port
  midair sub 'orders.>'                  print what is published below orders
  midair pub orders.new 'three apples'   publish one message
  midair reply time --command date       answer requests with a command's output
  midair req time                        ask, and print the answer
  midair status                          what is running
  midair top                             watch it work
  midair conns --sort pending            who is connected, the slowest first
  midair subs 'orders.>'                 who has subscribed to what
  midair bench --against 127.0.0.1:4333  measure it beside another server
  midair upgrade all --to /opt/midair-2  replace every process, keeping connections
  midair trace on --run monday           record the latencies of one message in 100
  midair trace off                       end that: traces/monday is complete
  midair dashboard traces/monday         report on the latencies of a trace run
  midair drill                           upgrade and kill everything under load
  midair reload                          apply a changed configuration, keeping connections
  midair down                            stop it
"""


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends a command as Ctrl-C does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command: its exit code (see exits.py). Failures are one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is no failure
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = _parse(argv)
        with _ends_on_signals():
            return int(args.run(args))
    except MidairError as error:
        print(f"midair: {error}", file=sys.stderr)
        return error.code
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output has gone (| head); keep the interpreter from saying so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except OSError as error:
        about = f"{error.filename}: " if error.filename else ""
        print(f"midair: {about}{error.strerror or error}", file=sys.stderr)
        return Exit.FAILED


@contextlib.contextmanager
def _ends_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end every command, whatever it was started with.

    A shell starts the background jobs of a script with SIGINT ignored, others block signals; a
    process passes both on to those it starts. Commands that have handlers of their own (`up`) set
    them afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in ending}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses, also with BODY after the options, where argparse does not look for it."""
    it = parser()
    args, rest = it.parse_known_args(argv)
    bodyless = getattr(args, "body", "") is None
    if bodyless and len(rest) == 1 and (rest[0] == "-" or not rest[0].startswith("-")):
        args.body = rest[0]
    elif rest:
        it.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="midair",
        description="A message router whose every part can be replaced while it is working.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--version", action="version", version=f"midair {__version__}")
    commands = result.add_subparsers(required=True, metavar="COMMAND", title="commands")

    it = commands.add_parser("up", help="start an instance and keep it running")
    it.add_argument("--config", metavar="FILE", help="configuration (TOML)")
    it.add_argument("--name", metavar="INSTANCE", help="default: server.name, or midair")
    it.add_argument("--host", help="listen on this address only (default: server.listen)")
    it.add_argument("--port", type=arguments.port, help="listen on this port; 0: any free one")
    it.add_argument(
        "--connmgrs",
        type=arguments.integer(1, names.CONNMGRS_MAX),
        metavar="N",
        help="connection managers",
    )
    it.add_argument(
        "--monitor",
        type=arguments.checked(_monitor_address),
        metavar="PORT",
        help="serve /healthz, /varz, /connz, /subsz and /metrics on 127.0.0.1:PORT; 0: any free "
        "one; HOST:PORT: elsewhere (default: monitor.listen)",
    )
    it.add_argument("--log", metavar="FILE", help="write the log there (default: log.file)")
    it.set_defaults(run=_up)

    it = commands.add_parser("down", help="stop an instance")
    _add_name(it)
    it.add_argument(
        "--lame-duck",
        action="store_true",
        help="accept nobody, tell clients, let them leave within server.lame_duck_s, then stop",
    )
    it.set_defaults(run=_down)

    it = commands.add_parser(
        "reload",
        help="read the configuration again and apply it, keeping connections",
        description="Has a running instance read its configuration file again. Parts that need it "
        "are restarted one after the other, without ending a connection or losing a message. If "
        "one does not come up, everything goes back to the old configuration.",
    )
    _add_name(it)
    it.add_argument("--dry-run", action="store_true", help="only show what would change")
    it.add_argument("--json", action="store_true", help="for programs")
    it.set_defaults(run=_reload)

    it = commands.add_parser("status", help="show what is running")
    _add_name(it)
    it.add_argument("--json", action="store_true", help="for programs")
    it.set_defaults(run=_status)

    it = commands.add_parser(
        "upgrade",
        help="replace components of a running instance by another version",
        description="Replaces components of a running instance, without ending a connection "
        "or losing a message. If the new version does not work, the old one goes on.",
    )
    it.add_argument("target", metavar="router|dispatcher|connmgr[/N]|keeper|monitor|manager|all")
    it.add_argument(
        "--to",
        metavar="PATH",
        help="virtual environment, or directory with the packages, of the new version "
        "(default: the one of this command)",
    )
    _add_name(it)
    it.add_argument(
        "--timeout",
        metavar="S",
        type=arguments.seconds,
        default=upgrade.READY_S,
        help="seconds a new process may take to get ready (default: %(default)g)",
    )
    it.set_defaults(run=_upgrade)

    it = commands.add_parser("check-config", help="check a configuration file")
    it.add_argument("file", metavar="FILE")
    it.set_defaults(run=_check_config)

    look.add_commands(commands)
    fsck.add_command(commands)
    client_commands.add_commands(commands)
    trace_commands.add_commands(commands)
    drill.add_command(commands)
    for package in ADDED:
        if importlib.util.find_spec(package):
            importlib.import_module(f"{package}.command").add_command(commands)
    return result


def _up(args: argparse.Namespace) -> int:
    source = Source(
        file=None if args.config is None else os.path.abspath(args.config),
        name=args.name,
        host=args.host,
        port=args.port,
        connmgrs=args.connmgrs,
        monitor=args.monitor,
        log=None if args.log is None else os.path.abspath(args.log),
    )
    up.up(source, _check_listeners)
    return Exit.OK


def _reload(args: argparse.Namespace) -> int:
    found = status.find(names.check_instance(args.name))
    ask_reload.run(found, args.dry_run, args.json)
    return Exit.OK


def _check_listeners(conf: config.Config) -> None:
    """What is spoken there has to be known to the C part, which the configuration does not ask."""
    if any(item.protocol or item.transport for item in conf.server.listen):
        from native import protocol

        for item in conf.server.listen:
            protocol.number(item.protocol)
            protocol.transport(item.transport)


def _down(args: argparse.Namespace) -> int:
    print(status.down(names.check_instance(args.name), args.lame_duck))
    return Exit.OK


def _status(args: argparse.Namespace) -> int:
    report = status.gather(names.check_instance(args.name))
    print(json.dumps(report, indent=2) if args.json else status.table(report))
    return Exit.OK


def _upgrade(args: argparse.Namespace) -> int:
    target = ask_upgrade.check_target(args.target)
    found = status.find(names.check_instance(args.name))
    ask_upgrade.run(found, target, args.to, args.timeout)
    return Exit.OK


def _check_config(args: argparse.Namespace) -> int:
    conf = config.load(args.file)
    _check_listeners(conf)
    print(f"{args.file}: ok (instance {conf.server.name}, {conf.connmgrs} connection managers)")
    return Exit.OK


def _monitor_address(text: str) -> str:
    address = text if ":" in text else f"127.0.0.1:{text}"
    config.split_address(address)
    return address


def _add_name(it: argparse.ArgumentParser) -> None:
    it.add_argument("--name", metavar="INSTANCE", default="midair", help="default: midair")


if __name__ == "__main__":
    sys.exit(main())
