"""The configuration: what is refused, how it is said, and that nothing is ignored."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midair import config
from midair.config import Config, Listener
from midair.errors import ConfigError
from midair.exits import Exit
from midair.toml_lines import Lines
from tests.support.instance import cli


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "m.toml")
    return str(caught.value)


def test_empty_file_gives_the_defaults() -> None:
    assert config.parse("") == Config()
    assert Config().server.listen == (Listener("127.0.0.1:4222"),)
    assert Config().limits.max_payload == 1048576


def test_every_value_can_be_written_and_read_back() -> None:
    conf = config.parse(
        """
        [server]
        name = "a-1"
        listen = ["0.0.0.0:1", "[::1]:2", {address = "localhost:0", slow_consumer = "drop-newest"}]
        lame_duck_s = 60
        lame_duck_grace_s = 5.5
        [limits]
        max_payload = "64MiB"
        max_control_line = "5KiB"
        max_connections = 10
        max_subscriptions = 5
        max_pending = "1MB"
        write_deadline_s = 0.5
        ping_interval_s = 3
        ping_max = 7
        name_answer_s = 4
        slow_consumer = "backpressure"
        max_messages_per_s = 1000
        max_bytes_per_s = "1MiB"
        rate_action = "close"
        [connmgr]
        count = 3
        retiring = 1
        arena_bytes = 83886080
        output_bytes = "160 MiB"
        subscriptions = 2048
        [router]
        user = "nobody"
        subjects = 4096
        other_ports = 1
        [queues]
        depth = 4
        [latency]
        spin_us = 20
        pin = true
        flow_leases = false
        pace_local = true
        [manager]
        restart_limit = 9
        restart_window_s = 1.5
        watchdog_s = 2
        standby = true
        [monitor]
        listen = "127.0.0.1:8222"
        [trace]
        ring_bytes = "1MiB"
        [log]
        level = "debug"
        file = "midair.log"
        """
    )
    assert conf.limits.max_payload == 64 * 2**20
    assert conf.limits.max_pending == 10**6
    assert conf.connmgr.output_bytes == 160 * 2**20
    assert conf.limits.ping_interval_s == 3.0
    assert conf.connmgrs == 3
    assert conf.slow_consumers == ["backpressure", "backpressure", "drop-newest"]
    moved = conf.listening_on(["127.0.0.1:7", "127.0.0.1:8", "127.0.0.1:9"])
    assert moved.slow_consumers == conf.slow_consumers
    default = Config()
    for table in dataclasses.fields(Config):
        for key, value in dataclasses.asdict(getattr(conf, table.name)).items():
            assert value != getattr(getattr(default, table.name), key), f"{table.name}.{key}"
    assert config.parse(conf.to_toml()) == conf


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (
            "[limits]\n\nmax_paylod = 1",
            3,
            "limits.max_paylod: there is no such key; did you mean 'm",
        ),
        ("# x\n[limit]\n", 2, "limit: there is no such table; did you mean 'limits'?"),
        ("limits.max_payloads = 3", 1, "did you mean 'max_payload'?"),
        ("name = 'x'", 1, "name: there is no such table"),
        ("server = 3", 1, "server: is a table: write [server]"),
        ("[server]\nlisten = [\n'127.0.0.1:1',\n]\nnmae = 'x'", 5, "did you mean 'name'?"),
        ("[limits]\nmax_payload = '65MiB'", 2, "1 to 67108864 bytes are allowed"),
        ("[limits]\nmax_payload = '3 apples'", 2, '"3 apples": 1 to 67108864 bytes'),
        ("[limits]\nmax_payload = true", 2, "true: 1 to 67108864 bytes"),
        ("[limits]\nping_max = '2'", 2, "an integer from 1 to 1000 is allowed"),
        ("[limits]\nping_max = 0", 2, "0: an integer from 1 to 1000"),
        ("[limits]\nmax_connections = true", 2, "an integer from 1 to"),
        ("[limits]\nwrite_deadline_s = nan", 2, "a number from 0.01 to 86400"),
        ("[log]\nlevel = 'loud'", 2, "one of debug, info, warning, error is allowed"),
        ("[server]\nname = 'Big One'", 2, "use 1 to 32 of a-z"),
        ("[server]\nlisten = '127.0.0.1:4222'", 2, 'a list of "host:port" strings'),
        ("[server]\nlisten = []", 2, 'a list of "host:port" strings'),
        ("[server]\nlisten = ['::1:4222']", 2, '"host:port" or "[ipv6]:port" is allowed'),
        ("[server]\nlisten = ['a:65536']", 2, '"host:port" or "[ipv6]:port" is allowed'),
        ("[server]\nlisten = [4222]", 2, '"host:port" or "[ipv6]:port" is allowed'),
        ("[server]\nlisten = [{slow_consumer = 'disconnect'}]", 2, "`address` and perhaps"),
        ("[server]\nlisten = [{address = 'a:1', slow = 'x'}]", 2, "`address` and perhaps"),
        ("[server]\nlisten = [{address = 'a:1', slow_consumer = 'x'}]", 2, "one of disconnect, "),
        ("[server]\nname = \n", 2, "Invalid value"),
        ("[connmgr]\ncount = 33", 2, "an integer from 0 to 32"),
        ("[manager]\nstandby = 1", 2, "1: true or false is allowed"),
        ("\n\nserver = { nam = 'x' }", 3, "server.nam: there is no such key"),
        ("[server]\nname = 'a\\n'", 2, "use 1 to 32 of a-z"),
        ('[server]\nname = "a\\n"', 2, "use 1 to 32 of a-z"),
        ("[server]\nlisten = ['a:\uff14\uff12']", 2, '"host:port" or "[ipv6]:port" is allowed'),
        ("[server]\nlisten = ['h\u00f6st:1']", 2, '"host:port" or "[ipv6]:port" is allowed'),
        ("[server]\nlisten = ['a:1', 'b:1', 'A:1']", 2, '"A:1" and "a:1": each address'),
        ("[server]\nlisten = ['127.0.0.1:1', '0.0.0.0:1']", 2, "each address and port may be"),
        ("[server]\nlisten = ['[::1]:1', '[0:0::1]:1']", 2, "each address and port may be"),
        ("[monitor]\nlisten = '127.0.0.1:4222'", 2, "clients connect there (server.listen)"),
        ("[router]\nuser = 'no-such-user'", 2, "router.user: there is no user 'no-such-user'"),
        ("[limits]\nmax_payload = '\uff11KiB'", 2, "1 to 67108864 bytes are allowed"),
        ("[limits]\n\nmax_payload = " + "9" * 5000, 3, "the number is too long"),
        ("[limits]\nmax_payload = 0x" + "f" * 5000, 2, "this: 1 to 67108864 bytes"),
        ("[limits]\nmax_payload = '" + "9" * 5000 + "'", 2, "9...: 1 to 67108864 bytes"),
        ("[server]\nname" + ".a" * 5000 + " = 1", 2, "server.name: this: use 1 to 32"),
        ("[server]\nlisten = [" + "{a = " * 40 + "1" + "}" * 40 + "]", 2, "`address` and perhaps"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(text: str, line: int, says: str) -> None:
    message = refused(text)
    assert message.startswith(f"m.toml:{line}: "), message
    assert says in message
    assert "\n" not in message


def test_what_a_manager_writes_for_parts_may_have_more_than_they_know(tmp_path: Path) -> None:
    conf = Config().listening_on(["127.0.0.1:1", "127.0.0.1:2"]).with_("queues", depth=7)
    listen = 'listen = [{address = "127.0.0.1:1", to_come = 1}, "127.0.0.1:2"]'
    text = conf.for_parts("9.9").replace('listen = ["127.0.0.1:1", "127.0.0.1:2"]', listen)
    text = text.replace("[limits]", "[limits]\nto_come = {a = 1}") + "[to_come]\nkey = [1]\n"
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert config.load_part(path) == conf.counted()
    # A value that is not allowed is refused there too, and a user's file as ever.
    path.write_text(text.replace("depth = 7", "depth = 1"))
    with pytest.raises(
        ConfigError, match=r"queues\.depth: 1: an integer from 2 to 65536 is allowed"
    ):
        config.load_part(path)
    path.write_text(text.replace(listen, "listen = 3"))
    with pytest.raises(ConfigError, match=r"server\.listen: 3: a list of "):
        config.load_part(path)
    for reads, written in ((config.load, text), (config.load_part, text.partition("\n")[2])):
        path.write_text(written)
        with pytest.raises(ConfigError, match="`address` and perhaps `slow_consumer`, `protocol`"):
            reads(path)
        path.write_text(written.replace(", to_come = 1", ""))
        with pytest.raises(ConfigError, match=r"limits\.to_come: there is no such key"):
            reads(path)


def test_keys_inside_strings_and_lists_are_not_keys() -> None:
    text = '''[router]
user = """
subjects = 1
[limits]
"""
[limits] # [server]
max_connections = 1 # name = 2
'''
    lines = Lines(text)
    assert lines.find("router", "user") == 2
    assert lines.find("router", "subjects") == 1  # not there: the table that would hold it
    assert lines.find("limits", "max_connections") == 7
    assert lines.find("limits") == 6


def test_quoted_and_dotted_keys_are_found() -> None:
    lines = Lines("a.'b'.\"c\" = 1\n[ x . y ]\nz.w = [1, # ]\n 2]\nlast = 'a\\'\n")
    assert lines.find("a", "b", "c") == 1
    assert lines.find("x", "y", "z", "w") == 3
    assert lines.find("x", "y", "last") == 5


def test_what_is_nested_too_deeply_is_refused() -> None:
    for text in ("[" * 5000 + "]" * 5000, "{a = " * 5000 + "1" + "}" * 5000):
        message = refused(f"[server]\nlisten = {text}")
        assert message == "m.toml: lists and tables are nested too deeply"


def test_listeners_on_any_free_port_are_not_in_each_others_way() -> None:
    conf = config.parse("[server]\nlisten = ['127.0.0.1:0', '127.0.0.1:0', '[::1]:4', '0.0.0.0:4']")
    assert len(conf.server.listen) == 4


def test_a_closed_listener_is_in_nobodys_way() -> None:
    conf = config.parse(
        "[server]\nlisten = ['a:1', {address = 'a:1', closed = true}, {address = 'a:2', "
        "closed = true}, {address = 'a:1', closed = true}]\n[monitor]\nlisten = 'a:2'"
    )
    assert [it.closed for it in conf.server.listen] == [None, True, True, True]


@given(st.text(max_size=200))
def test_any_text_is_either_used_or_refused(text: str) -> None:
    try:
        conf = config.parse(text)
    except ConfigError as error:
        said = str(error)
    else:
        said = "<config>:"
        assert config.parse(conf.to_toml()) == conf
    assert said.startswith("<config>:")


def test_number_of_connmgrs_follows_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 1), (4, 2), (8, 4), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, n=cores: set(range(n)))
        assert Config().connmgrs == expected


def test_a_part_that_is_bound_to_one_core_counts_the_same_connmgrs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """003-10: `latency.pin` with `count = 0`."""
    path = tmp_path / "config.toml"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    path.write_text("[latency]\npin = true\n")
    of_a_user = config.load_part(path)
    of_a_manager = config.load(path).for_parts("0.0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {7})
    assert (of_a_user.connmgrs, of_a_user.ports) == (4, 4)
    path.write_text(of_a_manager)
    assert config.load_part(path) == of_a_user


def test_check_config_command(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text("[server]\nname = 'shop'\n")
    done = cli("check-config", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok (instance shop" in done.stdout
    path.write_text("[sever]\n")
    done = cli("check-config", str(path))
    assert done.returncode == Exit.BAD_CONFIG
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"midair: {path}:1: sever: ")
    done = cli("check-config", str(tmp_path / "none.toml"))
    assert done.returncode == Exit.BAD_CONFIG
    assert "No such file" in done.stderr
    path.write_text("[server]\nlisten = [{address = 'a:1', protocol = 'gopher'}]\n")
    done = cli("check-config", str(path))
    assert done.returncode == Exit.BAD_CONFIG
    assert "protocol 'gopher': one of " in done.stderr
    for what in ("/dev/zero", str(tmp_path)):
        done = cli("check-config", what)
        assert done.returncode == Exit.BAD_CONFIG
        assert done.stderr.count("\n") == 1
