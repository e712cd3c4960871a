"""The messaging modes from Python, on top of nats-py: `midair.client.api.connect()`.

Whatever this does goes over the NATS protocol with headers that docs/modes.md describes, so that
any other client can do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import nats
import nats.errors
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

MODE, DEADLINE, EXPECT = "Midair-Mode", "Midair-Deadline", "Midair-Expect"
CLIENT, NAME, TOPICS = "Midair-Client", "Midair-Name", "Midair-Topics"
SEMAPHORE, FANOUT, MORE = "semaphore", "fanout", "more"
SESSION_OPEN, SESSION, SESSION_END = "session-open", "session", "session-end"
IPC_PREFIX, CLIENTS = "_midair.ipc.", "_midair.clients"
WORD = re.compile(r"[A-Za-z0-9_-]+")  # a type, an instance, an organisation
NAME_MAX = 63  # bytes of TYPE.INSTANCE@ORGANISATION
NAME_TAKEN = "Client Name Taken"  # what -ERR says
DEADLINE_S = 30.0  # of a request that is given none


class RequestError(Exception):
    """A request will get no (further) answer. `status` is the code the server gave."""

    status = 0


class NoRespondersError(RequestError):
    """Nobody listens there."""

    status = 503


class ExpiredError(RequestError):
    """The deadline passed."""

    status = 408


class GoneError(RequestError):
    """The other side went away, or there is no such session."""

    status = 410

    def __init__(self, text: str, client: int = 0, name: str = "") -> None:
        super().__init__(text)
        self.client = client  # its number, 0 if not known
        self.name = name  # TYPE.INSTANCE, if it has one


class RefusedError(RequestError):
    """The server does not take the request: a limit, or headers that mean nothing."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class SessionEndedError(RequestError):
    """The responder ended the session. `body` is what it said last."""

    def __init__(self, body: bytes) -> None:
        super().__init__("the responder ended the session")
        self.body = body


class ReplyLostError(RequestError):
    """The request was answered, but this client reads too slowly: the reply was left out."""


class NameTakenError(Exception):
    """Another client has that type and instance."""


@dataclass(frozen=True)
class Gone:
    """A listener of a fanout request that went away before it had answered."""

    client: int
    name: str


@dataclass(frozen=True)
class Presence:
    """A client that has a name. `event` is up or down when it was watched for, else empty."""

    type: str
    instance: str
    client: int
    event: str = ""
    organisation: str = ""  # if it said one


def address(type: str, instance: str) -> str:
    """The subject of one named client."""
    return f"{IPC_PREFIX}{type}.{instance}"


def everyone(type: str = "", organisation: str = "") -> str:
    """The subject of all clients of a type, of an organisation, or of both."""
    if not type and not organisation:
        raise ValueError("give a type, an organisation, or both")
    parts = [f"kind.{type}"] if type else []
    return "_midair." + ".".join(parts + ([f"org.{organisation}"] if organisation else []))


def _header(message: Msg, name: str) -> str:
    return (message.headers or {}).get(name, "")


def _ends(message: Msg) -> bool:
    """Whether this is the end of the replies; an error is raised."""
    status = _header(message, "Status")
    if not status:
        return False
    text = _header(message, "Description")
    if status == "204":
        return True
    if status == "503":
        raise NoRespondersError("nobody listens there")
    if status == "408":
        raise ExpiredError("the deadline passed")
    if status == "410":
        raise GoneError(text.lower(), int(_header(message, CLIENT) or 0), _header(message, NAME))
    raise RefusedError(text, int(status))


class _Answers:
    """What arrives for one request or session, in order."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.inbox, self._queue = client._expect()

    async def next(self) -> Msg:
        message = await self._queue.get()
        if message is None:
            raise GoneError("the connection to the server is lost")
        return message

    def close(self) -> None:
        self._client._forget(self.inbox)


class Request:
    """What a handler is given."""

    def __init__(self, client: Client, message: Msg) -> None:
        self._nats = client.nats
        self._message = message
        self.body: bytes = message.data
        self.subject: str = message.subject
        self.headers: dict[str, str] = dict(message.headers or {})
        self.mode: str = self.headers.get(MODE, "")
        self.answered = False

    @property
    def session(self) -> str:
        """The same for all requests of one session; empty outside of one."""
        return self._message.reply if self.mode.startswith(SESSION) or self.gone else ""

    @property
    def last(self) -> bool:
        """The session is over: the requester ended it, or is gone. There is nothing to answer."""
        return self.mode == SESSION_END or self.gone

    @property
    def gone(self) -> bool:
        return self.headers.get("Status") == "410"

    @property
    def wants_reply(self) -> bool:
        return bool(self._message.reply) and not self.last

    async def more(self, body: bytes) -> None:
        """A reply after which others follow."""
        await self._nats.publish(self._message.reply, body, headers={MODE: MORE})

    async def reply(self, body: bytes) -> None:
        """The reply, or the last of several; in a session, one of its replies."""
        self.answered = True
        await self._nats.publish(self._message.reply, body)

    async def end_session(self, body: bytes = b"") -> None:
        """The last reply of a session."""
        self.answered = True
        await self._nats.publish(self._message.reply, body, headers={MODE: SESSION_END})


Handler: TypeAlias = Callable[[Request], Awaitable[bytes | None]]


class Session:
    """A run of requests that stay with one responder. Ends with its `async with`."""

    def __init__(self, client: Client, subject: str) -> None:
        self._client = client
        self._subject = subject
        self._answers = _Answers(client)
        self._mode = SESSION_OPEN

    async def send(self, body: bytes) -> None:
        """A request; what comes back is to be had from `receive`."""
        if self._mode == SESSION_END:
            raise GoneError("the session is over")
        await self._publish(body, self._mode)
        self._mode = SESSION

    async def receive(self, timeout_s: float | None = None) -> bytes:
        """The next reply; None: however long it takes."""
        try:
            message = await asyncio.wait_for(self._answers.next(), timeout_s)
        except TimeoutError:
            raise ExpiredError(f"no reply within {timeout_s:g} s") from None
        _ends(message)
        if _header(message, MODE) == SESSION_END:
            self._mode = SESSION_END
            raise SessionEndedError(message.data)
        return message.data

    async def request(self, body: bytes, timeout_s: float | None = DEADLINE_S) -> bytes:
        """One request and its reply.

        One that does not come in time ends the session: it could not be told from the next.
        """
        await self.send(body)
        try:
            return await self.receive(timeout_s)
        except ExpiredError:
            await self.end()
            raise

    async def end(self, body: bytes = b"") -> None:
        """Tells the responder that it is over. Replies on their way do not arrive any more."""
        if self._mode == SESSION:
            self._mode = SESSION_END
            await self._publish(body, SESSION_END)
        self._answers.close()

    async def _publish(self, body: bytes, mode: str) -> None:
        inbox = self._answers.inbox
        await self._client.nats.publish(self._subject, body, reply=inbox, headers={MODE: mode})

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.end()


class Fanout:
    """Replies of all listeners as they come, and who went away; `expected` says how many."""

    def __init__(self, answers: _Answers, expected: int) -> None:
        self._answers = answers
        self.expected = expected

    async def __aiter__(self) -> AsyncIterator[bytes | Gone]:
        try:
            while True:
                message = await self._answers.next()
                try:
                    if _ends(message):
                        return
                    yield message.data
                except GoneError as gone:
                    yield Gone(gone.client, gone.name)
        finally:
            self._answers.close()


class Client:
    """A connection. `nats` is the client of nats-py it is made of, for everything else."""

    def __init__(self, name: str, organisation: str = "") -> None:
        self.nats = Nats()
        self.name = name  # TYPE.INSTANCE, or empty
        self.organisation = organisation  # or empty
        self.closed = asyncio.Event()  # the connection is over for good
        self._waiting: dict[str, asyncio.Queue[Msg | None]] = {}
        self._prefix = ""
        self._asked = 0

    # ---- asking ----

    async def publish(
        self,
        subject: str,
        body: bytes,
        headers: dict[str, str] | None = None,
        topics: Sequence[str] = (),
    ) -> None:
        """Broadcast: to everybody who listens now, to the subject or to one of `topics`."""
        if topics:
            headers = {**(headers or {}), TOPICS: ", ".join(topics)}
        await self.nats.publish(subject, body, headers=headers)

    async def ask(self, subject: str, body: bytes, deadline_s: float = DEADLINE_S) -> bytes:
        """Semaphore: the reply of one responder; the last, if it gives several."""
        last: bytes | None = None
        async for reply in self.replies(subject, body, deadline_s):
            last = reply
        if last is None:
            raise ReplyLostError("the reply was left out: this client reads too slowly")
        return last

    async def replies(
        self, subject: str, body: bytes, deadline_s: float = DEADLINE_S
    ) -> AsyncIterator[bytes]:
        """Semaphore: all replies of one responder."""
        answers = await self._ask(subject, body, SEMAPHORE, deadline_s)
        try:
            while not _ends(message := await answers.next()):
                yield message.data
        finally:
            answers.close()

    async def fanout(self, subject: str, body: bytes, deadline_s: float = DEADLINE_S) -> Fanout:
        """A request to everybody who listens."""
        answers = await self._ask(subject, body, FANOUT, deadline_s)
        try:
            message = await answers.next()
            if _header(message, "Status") != "202":
                _ends(message)
            return Fanout(answers, int(_header(message, EXPECT)))
        except BaseException:
            answers.close()
            raise

    def session(self, subject: str) -> Session:
        """A session with one responder; it begins with the first request."""
        return Session(self, subject)

    async def clients(self, type: str = "", instance: str = "") -> list[Presence]:
        """Who is there: all who have a name, or one."""
        subject = f"{CLIENTS}.{type}.{instance}" if type else CLIENTS
        answers = _Answers(self)
        try:
            await self.nats.publish(subject, b"", reply=answers.inbox)
            found: list[Presence] = []
            while not _ends(message := await answers.next()):
                found += [Presence(**it) for it in json.loads(message.data)]
            return found
        finally:
            answers.close()

    async def watch(self, pattern: str = ">") -> AsyncIterator[Presence]:
        """Who comes and who goes from now on; `pattern` for TYPE.INSTANCE."""
        subscription = await self.nats.subscribe(f"{CLIENTS}.{pattern}")
        await self.flush()

        async def events() -> AsyncIterator[Presence]:
            try:
                async for message in subscription.messages:
                    yield Presence(**json.loads(message.data))
            finally:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()

        return events()

    # ---- answering ----

    async def subscribe(
        self, subject: str, handler: Callable[[Msg], Awaitable[None]], queue: str = ""
    ) -> Subscription:
        """Messages as they come."""
        return await self.nats.subscribe(subject, queue=queue, cb=handler)

    async def serve(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        """Answers requests of every mode. What the handler returns is the (last) reply."""

        async def on_message(message: Msg) -> None:
            request = Request(self, message)
            answer = await handler(request)
            if answer is not None and request.wants_reply and not request.answered:
                await request.reply(answer)

        return await self.nats.subscribe(subject, queue=queue, cb=on_message)

    async def listen(self, handler: Handler) -> Subscription:
        """Answers what is sent to this client's own name."""
        if not self.name:
            raise ValueError("this client has no name: give connect() a type and an instance")
        return await self.serve(IPC_PREFIX + self.name, handler)

    async def join(self, handler: Handler) -> list[Subscription]:
        """Answers what is sent to everyone of this client's type, of its organisation, or both."""
        if not self.name:
            raise ValueError("this client has no name: give connect() a type and an instance")
        type = self.name.partition(".")[0]
        subjects = [everyone(type)]
        if self.organisation:
            subjects += [everyone("", self.organisation), everyone(type, self.organisation)]
        return [await self.serve(subject, handler) for subject in subjects]

    async def flush(self, timeout_s: float = 10) -> None:
        """Returns when the server has done everything asked of it so far.

        Twice: the PING of nats-py overtakes what was published and not yet written.
        """
        await self.nats.flush(timeout_s)  # type: ignore[arg-type]
        await self.nats.flush(timeout_s)  # type: ignore[arg-type]

    async def close(self) -> None:
        await self.nats.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- inside ----

    async def _ask(self, subject: str, body: bytes, mode: str, deadline_s: float) -> _Answers:
        answers = _Answers(self)
        headers = {MODE: mode, DEADLINE: str(max(1, round(deadline_s * 1000)))}
        await self.nats.publish(subject, body, reply=answers.inbox, headers=headers)
        return answers

    async def _start(self) -> None:
        self._prefix = self.nats.new_inbox()
        await self.nats.subscribe(f"{self._prefix}.*", cb=self._arrived)

    async def _arrived(self, message: Msg) -> None:
        queue = self._waiting.get(message.subject)
        if queue is not None:
            queue.put_nowait(message)

    async def _lost(self) -> None:
        """The server forgets what a connection asked when it ends."""
        for queue in self._waiting.values():
            queue.put_nowait(None)

    def _expect(self) -> tuple[str, asyncio.Queue[Msg | None]]:
        self._asked += 1
        inbox = f"{self._prefix}.{self._asked}"
        queue = self._waiting[inbox] = asyncio.Queue()
        return inbox, queue

    def _forget(self, inbox: str) -> None:
        self._waiting.pop(inbox, None)


def _called(type: str, instance: str, organisation: str) -> str:
    """TYPE.INSTANCE@ORGANISATION, as far as it is given."""
    if bool(type) != bool(instance):
        raise ValueError("give type and instance, or neither")
    if organisation and not type:
        raise ValueError("an organisation goes with a type and an instance")
    for word in filter(None, (type, instance, organisation)):
        if not WORD.fullmatch(word):
            raise ValueError(f"{word!r}: letters, digits, _ and - are allowed")
    called = f"{type}.{instance}" if type else ""
    called += f"@{organisation}" if organisation else ""
    if len(called) > NAME_MAX:
        raise ValueError(f"{called!r} has {len(called)} bytes, at most {NAME_MAX} are allowed")
    return called


async def connect(
    server: str = "127.0.0.1:4222",
    *,
    type: str = "",
    instance: str = "",
    organisation: str = "",
    **options: Any,
) -> Client:
    """A client, called TYPE.INSTANCE if both are given. `options` are those of nats-py."""
    called = _called(type, instance, organisation)
    client = Client(called.partition("@")[0], organisation)
    if called:
        options["name"] = f"ipc:{called}"
    lost, failed = options.pop("disconnected_cb", None), options.pop("error_cb", None)
    closed = options.pop("closed_cb", None)
    taken = asyncio.Event()

    async def on_lost() -> None:
        await client._lost()
        if lost:
            await lost()

    async def on_error(error: Exception) -> None:
        if NAME_TAKEN in str(error):
            taken.set()
        if failed:
            await failed(error)

    async def on_closed() -> None:
        client.closed.set()
        if closed:
            await closed()

    url = server if "://" in server else f"nats://{server}"
    options |= {"disconnected_cb": on_lost, "error_cb": on_error, "closed_cb": on_closed}
    connecting = asyncio.create_task(client.nats.connect(url, **options))
    refused = asyncio.create_task(taken.wait())  # nats-py would try again and again
    try:
        await asyncio.wait({connecting, refused}, return_when=asyncio.FIRST_COMPLETED)
        if taken.is_set():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await client.nats.close()
            raise NameTakenError(f"another client is called {client.name}")
        await connecting
    finally:
        connecting.cancel()
        refused.cancel()
    await client._start()
    return client
