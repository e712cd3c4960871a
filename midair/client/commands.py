"""`midair pub|sub|req|reply|clients`: a client on the command line, for trying things out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from midair import config
from midair.arguments import checked, positive, seconds
from midair.errors import MidairError, NotRunningError
from midair.exits import Exit

if TYPE_CHECKING:  # the client library takes longer to import than `midair status` to run
    from nats.aio.client import Client as Nats
    from nats.aio.msg import Msg

    from midair.client.api import Client, Presence, Request

DEFAULT_SERVER = "127.0.0.1:4222"
CONNECT_S = 5
NAME_MAX = 63  # as in midair/client/api.py, which takes long to import
Command: TypeAlias = "Callable[[Client, argparse.Namespace], Awaitable[int]]"
MODES = ("plain", "broadcast", "semaphore", "session", "fanout", "ipc")


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser's subcommands."""
    it = _add(commands, "pub", "publish a message", _pub)
    it.add_argument("body", metavar="BODY", nargs="?", help="text; -: from stdin")
    it.add_argument("--count", type=positive, default=1, metavar="N", help="publish it N times")
    it.add_argument("--reply", type=_word, metavar="SUBJECT", help="where answers should go")
    _add_header(it)

    it = _add(commands, "sub", "print messages as they come", _sub)
    it.add_argument("--queue", type=_word, metavar="GROUP", help="share the work of a group")
    it.add_argument("--count", type=positive, metavar="N", help="end after N messages")
    it.add_argument("--raw", action="store_true", help="bodies only, byte for byte")

    it = _add(commands, "req", "send a request and print the answer", _req)
    it.add_argument("body", metavar="BODY", nargs="?", help="text; -: from stdin")
    it.add_argument("--timeout", type=seconds, default=2.0, metavar="S", help="default: 2")
    it.add_argument("--replies", type=positive, default=1, metavar="N", help="wait for N")
    it.add_argument(
        "--mode", choices=MODES, default="plain",
        help="semaphore: to the least busy of a group; session: each line of stdin, all to the "
        "same responder; fanout: to all; ipc: SUBJECT is TYPE.INSTANCE (docs/modes.md)",
    )  # fmt: skip
    _add_header(it)

    it = _add(commands, "reply", "answer requests", _reply)
    it.add_argument("body", metavar="BODY", nargs="?", help="the answer (default: the request)")
    it.add_argument("--command", metavar="CMD", help="shell command: request in, answer out")
    it.add_argument(
        "--lines", action="store_true", help="each line of the answer is a reply of its own"
    )
    it.add_argument("--queue", type=_word, metavar="GROUP", help="share the work of a group")
    it.add_argument("--count", type=positive, metavar="N", help="end after N requests")
    it.add_argument(
        "--end-session", metavar="TEXT", help="a request with this body ends its session"
    )
    it.add_argument(
        "--as", dest="called", type=_name, default=("", "", ""), metavar="TYPE.INSTANCE[@ORG]",
        help="be called that, and answer what is sent there, too, and to all of that type or ORG",
    )  # fmt: skip

    it = commands.add_parser("clients", help="show the clients that have a name")
    it.add_argument("--watch", action="store_true", help="go on, and print who comes and goes")
    it.add_argument("--count", type=positive, metavar="N", help="end after N of those")
    _add_server(it)
    it.set_defaults(run=lambda args: asyncio.run(_run(_clients, args)), subject="clients")


def _add(commands: Any, name: str, about: str, command: Command) -> argparse.ArgumentParser:
    it: argparse.ArgumentParser = commands.add_parser(name, help=about)
    it.add_argument("subject", type=_word, metavar="SUBJECT")
    _add_server(it)
    it.set_defaults(run=lambda args: asyncio.run(_run(command, args)))
    return it


def _add_server(it: argparse.ArgumentParser) -> None:
    it.add_argument(
        "--server", type=checked(_server), default=DEFAULT_SERVER, metavar="HOST:PORT",
        help=f"default: {DEFAULT_SERVER}",
    )  # fmt: skip


def _add_header(it: argparse.ArgumentParser) -> None:
    it.add_argument(
        "--header", action="append", default=[], type=_header, metavar="K:V", help="repeatable"
    )


async def _run(command: Command, args: argparse.Namespace) -> int:
    """Connects, runs one command, and turns what can be expected to fail into one line."""
    import nats.errors

    from midair.client import api as modes

    failed: list[Exception] = []

    async def on_error(error: Exception) -> None:
        failed.append(error)

    kind, instance, organisation = getattr(args, "called", ("", "", ""))
    try:
        client = await modes.connect(
            args.server,
            type=kind,
            instance=instance,
            organisation=organisation,
            name=f"midair {args.subject}"[:64],
            allow_reconnect=False,
            max_reconnect_attempts=1,  # 0 would mean: for ever
            reconnect_time_wait=0,
            connect_timeout=CONNECT_S,
            error_cb=on_error,
        )
    except modes.NameTakenError as error:
        raise MidairError(str(error)) from None
    except (OSError, UnicodeError, TimeoutError, nats.errors.Error) as error:
        why = failed[0] if failed else error
        raise NotRunningError(
            f"nobody answers at {args.server} ({_reason(why)}); is it running? (midair up)"
        ) from None
    try:
        code = await command(client, args)
        if not client.nats.is_closed:
            await client.flush(CONNECT_S)
        if failed:
            raise MidairError(f"{args.server}: {_reason(failed[0])}")
        return code
    except modes.ExpiredError:
        raise MidairError(
            f"no (further) answer from {args.subject} within {args.timeout:g} s", Exit.TIMEOUT
        ) from None
    except modes.NoRespondersError:
        raise MidairError(f"no responders: nobody is subscribed to {args.subject}") from None
    except modes.RequestError as error:
        raise MidairError(f"{args.subject}: {error}") from None
    except (nats.errors.Error, OSError) as error:
        why = failed[0] if failed else error
        raise MidairError(f"{args.subject}: {_reason(why)}") from None
    finally:
        with contextlib.suppress(Exception):
            await client.close()


async def _pub(client: Client, args: argparse.Namespace) -> int:
    body, headers = _body(args.body), _headers(args)
    for _ in range(args.count):
        await client.nats.publish(args.subject, body, reply=args.reply or "", headers=headers)
    return Exit.OK


async def _sub(client: Client, args: argparse.Namespace) -> int:
    subscription = await client.nats.subscribe(args.subject, queue=args.queue or "")
    await client.flush(CONNECT_S)
    _note(f"subscribed to {args.subject}; Ctrl-C ends")
    left = args.count
    async for message in subscription.messages:
        if args.raw:
            sys.stdout.buffer.write(message.data)
            sys.stdout.buffer.flush()
        else:
            _show(message)
        if left is not None:
            left -= 1
            if left == 0:
                return Exit.OK
    raise MidairError("the server closed the connection")


async def _req(client: Client, args: argparse.Namespace) -> int:
    """A request in the mode asked for; its replies on stdout, a line each."""
    body = _body(args.body)
    if args.mode == "plain":
        return await _plain_request(client.nats, args, body)
    if args.header:
        raise MidairError("--header goes with --mode plain only", Exit.USAGE)
    if args.mode == "broadcast":
        await client.publish(args.subject, body)
    elif args.mode == "session":
        await _session(client, args, body.splitlines() if args.body == "-" else [body])
    elif args.mode == "fanout":
        return await _fanout(client, args, body)
    else:
        subject = f"_midair.ipc.{args.subject}" if args.mode == "ipc" else args.subject
        async for reply in client.replies(subject, body, args.timeout):
            _print(reply)
    return Exit.OK


async def _session(client: Client, args: argparse.Namespace, requests: list[bytes]) -> None:
    from midair.client.api import SessionEndedError

    async with client.session(args.subject) as session:
        for body in requests:
            try:
                _print(await session.request(body, args.timeout))
            except SessionEndedError as ended:
                if ended.body:
                    _print(ended.body)
                raise


async def _fanout(client: Client, args: argparse.Namespace, body: bytes) -> int:
    from midair.client.api import Gone

    answers = await client.fanout(args.subject, body, args.timeout)
    _note(f"{answers.expected} replies to expect")
    code = Exit.OK
    async for reply in answers:
        if isinstance(reply, Gone):
            _note(f"gone without an answer: client {reply.client} {reply.name}".rstrip())
            code = Exit.FAILED
        else:
            _print(reply)
    return code


async def _plain_request(client: Nats, args: argparse.Namespace, body: bytes) -> int:
    """One inbox for all answers; an empty answer with status 503 means nobody is there."""
    import nats.errors

    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, max_msgs=args.replies)
    await client.publish(args.subject, body, reply=inbox, headers=_headers(args))
    deadline = asyncio.get_running_loop().time() + args.timeout
    for got in range(args.replies):
        left_s = max(0.001, deadline - asyncio.get_running_loop().time())
        try:
            message = await subscription.next_msg(left_s)
        except nats.errors.TimeoutError:
            raise MidairError(
                f"{got} of {args.replies} answers from {args.subject} within {args.timeout:g} s",
                Exit.TIMEOUT,
            ) from None
        if not message.data and (message.headers or {}).get("Status") == "503":
            raise MidairError(f"no responders: nobody is subscribed to {args.subject}")
        _print(message.data)
    return Exit.OK


async def _reply(client: Client, args: argparse.Namespace) -> int:
    if args.body is not None and args.command is not None:
        raise MidairError("give BODY or --command, not both", Exit.USAGE)
    left = args.count

    async def answer(request: Request) -> None:
        nonlocal left
        if request.wants_reply:
            await _answer(request, args)
            await client.flush(CONNECT_S)
        if left is not None and not request.last:
            left -= 1
            if left == 0:
                client.closed.set()

    await client.serve(args.subject, answer, args.queue or "")
    if client.name:
        await client.listen(answer)
        await client.join(answer)
    await client.flush(CONNECT_S)
    _note(f"answering requests to {args.subject}; Ctrl-C ends")
    await client.closed.wait()
    if left != 0:
        raise MidairError("the server closed the connection")
    return Exit.OK


async def _clients(client: Client, args: argparse.Namespace) -> int:
    watching = await client.watch() if args.watch else None
    for it in sorted(await client.clients(), key=lambda it: (it.type, it.instance)):
        print(f"{_called(it)} client {it.client}", flush=True)
    if watching is None:
        return Exit.OK
    _note("watching who comes and goes; Ctrl-C ends")
    left = args.count
    async for it in watching:
        print(f"{it.event} {_called(it)} client {it.client}", flush=True)
        if left is not None:
            left -= 1
            if left == 0:
                return Exit.OK
    raise MidairError("the server closed the connection")


async def _answer(request: Request, args: argparse.Namespace) -> None:
    end = None if args.end_session is None else os.fsencode(args.end_session)
    if request.session and request.body == end:
        await request.end_session()
        return
    body = await _output(request.body, args)
    lines = body.splitlines() if args.lines and not request.session else []
    for line in lines[:-1]:
        await request.more(line)
    await request.reply(lines[-1] if lines else body)


async def _output(body: bytes, args: argparse.Namespace) -> bytes:
    if args.command is None:
        return body if args.body is None else os.fsencode(args.body)
    process = await asyncio.create_subprocess_shell(
        args.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate(body)
    return output


def _print(body: bytes) -> None:
    sys.stdout.buffer.write(body + b"\n")
    sys.stdout.buffer.flush()


def _show(message: Msg) -> None:
    print(f"{message.subject}: {message.data.decode(errors='replace')}")
    for name, value in (message.headers or {}).items():
        print(f"  {name}: {value}")
    sys.stdout.flush()


def _note(text: str) -> None:
    print(f"midair: {text}", file=sys.stderr, flush=True)


def _body(text: str | None) -> bytes:
    return sys.stdin.buffer.read() if text == "-" else os.fsencode(text or "")


def _headers(args: argparse.Namespace) -> dict[str, str] | None:
    return dict(args.header) or None


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).removeprefix("nats: ").strip()


def _word(text: str) -> str:
    """A subject or a group: what stands on the line of a command of the protocol."""
    if not text or not text.isprintable() or any(map(str.isspace, text)):
        raise argparse.ArgumentTypeError(f"{text!r}: one word without spaces is meant")
    return text


def _name(text: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"([\w-]+)\.([\w-]+)(?:@([\w-]+))?", _word(text), re.ASCII)
    if not found or len(text) > NAME_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r}: TYPE.INSTANCE or TYPE.INSTANCE@ORGANISATION is meant, of letters, digits, "
            f"_ and -, at most {NAME_MAX} bytes"
        )
    return found[1], found[2], found[3] or ""


def _called(it: Presence) -> str:
    return f"{it.type}.{it.instance}" + (f"@{it.organisation}" if it.organisation else "")


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r}: NAME:VALUE is meant")
    return name.strip(), value.strip()


def _server(text: str) -> str:
    address = text.removeprefix("nats://")
    config.split_address(address)
    return address
