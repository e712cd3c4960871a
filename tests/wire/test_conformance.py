"""Raw NATS conversations: right ones, wrong ones, whole and in small pieces."""

from __future__ import annotations

import pytest

from tests.support.server import Server
from tests.wire import conformance
from tests.wire.conformance import ACCEPTED, REFUSED, Conversation, Wire


def by_name(conversation: Conversation) -> str:
    return conversation.name


@pytest.mark.parametrize("conversation", ACCEPTED, ids=by_name)
def test_accepted(server: Server, conversation: Conversation) -> None:
    conformance.hold(server.host, server.port, conversation)


@pytest.mark.parametrize("piece", [1, 7])
@pytest.mark.parametrize("conversation", ACCEPTED, ids=by_name)
def test_accepted_in_pieces(server: Server, conversation: Conversation, piece: int) -> None:
    conformance.hold(server.host, server.port, conversation, piece)


@pytest.mark.parametrize("conversation", REFUSED, ids=by_name)
def test_refused_without_harm_to_others(server: Server, conversation: Conversation) -> None:
    conformance.check_bad_input(server.host, server.port, conversation)


def test_dead_client_is_forgotten(server: Server) -> None:
    conformance.check_dead_client_is_forgotten(server.host, server.port)


def test_info_has_what_clients_read(server: Server) -> None:
    with Wire(server.host, server.port) as one, Wire(server.host, server.port) as two:
        info = one.info
        assert info["proto"] == 1
        assert info["headers"] is True
        assert info["max_payload"] >= 1024
        assert info["client_ip"] == "127.0.0.1"
        assert info["port"] == server.port
        for key in ("server_id", "server_name", "version", "host"):
            assert isinstance(info[key], str), key
            assert info[key], key
        assert info["client_id"] != two.info["client_id"]
        assert info["server_id"] == two.info["server_id"]


def test_headers_are_cut_off_for_a_client_without_them(server: Server) -> None:
    with Wire(server.host, server.port) as plain, Wire(server.host, server.port) as sender:
        plain.say(conformance.NO_HEADERS + b"SUB strip.a 1\r\nPING\r\n")
        plain.read_until(1, 0)
        sender.say(conformance.QUIET + b"HPUB strip.a 12 14\r\nNATS/1.0\r\n\r\nhi\r\n")
        plain.read_until(1, 1)
        assert plain.messages == [b"MSG strip.a 1 2|hi"]


def test_largest_payload_and_one_byte_more(server: Server) -> None:
    with Wire(server.host, server.port) as wire:
        size = wire.info["max_payload"]
        body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        wire.say(conformance.QUIET + b"SUB big 1\r\nPUB big %d\r\n%b\r\n" % (size, body))
        wire.read_until(0, 1)
        assert wire.messages == [b"MSG big 1 %d|%b" % (size, body)]
        wire.say(b"PUB big %d\r\n" % (size + 1))
        wire.read_to_end()
        assert wire.control == [conformance.PAYLOAD]


def test_no_responders_answer_goes_to_the_asker_alone(server: Server) -> None:
    with Wire(server.host, server.port) as asker, Wire(server.host, server.port) as other:
        other.say(conformance.QUIET + b"SUB answers.> 1\r\nPING\r\n")
        other.read_until(1, 0)
        asker.say(conformance.QUIET + b"SUB answers.* 2\r\nPUB nobody.here answers.1 0\r\n\r\n")
        asker.read_until(0, 1)
        assert asker.messages == [b"HMSG answers.1 2 16 16|NATS/1.0 503\r\n\r\n"]
        asker.say(b"PUB answers.2 0\r\n\r\n")
        other.read_until(1, 1)
        assert other.messages == [b"MSG answers.2 1 0|"]


@pytest.mark.parametrize(
    ("send", "error"),
    [
        (b"PUB t.a\rb 2\r\n", conformance.PARSER_ERROR),
    ],
)
def test_what_only_midair_refuses(server: Server, send: bytes, error: bytes) -> None:
    with Wire(server.host, server.port) as wire:
        if wire.is_nats_server:
            pytest.skip("nats-server accepts it (docs/protocol-nats.md)")
        wire.say(conformance.QUIET + send)
        wire.read_to_end()
        assert wire.control == [error]
