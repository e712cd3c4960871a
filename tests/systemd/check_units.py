"""The unit files agree with the programs, and with each other. Needs no container."""

from __future__ import annotations

from pathlib import Path

import pytest

from midair import config, names
from midair.exits import FATAL
from tests.systemd.container import ROOT

UNITS = ROOT / "systemd"
MONITOR = "midair-monitor"
TRACER = "midair-tracer"
SERVICES = (
    "midair-keeper",
    "midair-router",
    "midair-connmgr@",
    "midair-dispatcher",
    MONITOR,
    TRACER,
)
# What is different in a sandbox. The monitor may not touch queues, and sees /proc; what the tracer
# writes is for others to read.
OWN = {
    MONITOR: ("SystemCallFilter=~mq_open", "ProtectProc=default"),
    TRACER: ("UMask=0022",),
}
SANDBOX = "# State outlives the process"


def settings(name: str, key: str) -> list[str]:
    """Every value of a key in a unit file."""
    lines = (UNITS / name).read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


@pytest.mark.parametrize(
    ("unit", "fd_name", "socket"),
    [
        ("midair-keeper", names.FD_KEEPER, names.KEEPER_SOCKET),
        ("midair-connmgr@", names.FD_HANDOFF, names.handoff_socket(0).replace("0", "%i")),
    ],
)
def test_peers_find_each_other(unit: str, fd_name: str, socket: str) -> None:
    path = f"/run/midair/{config.Config().server.name}/{socket}"
    assert settings(f"{unit}.socket", "ListenSequentialPacket") == [path]
    assert settings(f"{unit}.socket", "FileDescriptorName") == [fd_name]


def test_clients_find_the_dispatcher() -> None:
    conf = config.load(UNITS / "midair.toml")
    listen = [item.address for item in conf.server.listen]
    assert settings("midair-dispatcher.socket", "ListenStream") == listen
    assert settings("midair-dispatcher.socket", "FileDescriptorName") == [names.FD_CLIENT]


def test_the_monitor_is_there_for_who_asks_for_it() -> None:
    assert settings(f"{MONITOR}.socket", "ListenStream") == ["127.0.0.1:8222"]
    assert settings(f"{MONITOR}.socket", "FileDescriptorName") == [names.FD_MONITOR]
    assert not any(MONITOR in line for line in settings("midair.target", "Also"))
    conf = config.load(UNITS / "midair.toml")
    assert [conf.monitor.listen] == settings(f"{MONITOR}.socket", "ListenStream")


def test_the_tracer_is_there_for_who_asks_for_it() -> None:
    assert not any(TRACER in line for line in settings("midair.target", "Also"))


def test_as_many_connmgrs_are_enabled_as_configured() -> None:
    conf = config.load(UNITS / "midair.toml")
    enabled = " ".join(settings("midair.target", "Also")).split()
    wanted = [f"midair-connmgr@{index}.service" for index in range(conf.connmgrs)]
    assert [name for name in enabled if "connmgr" in name] == wanted


@pytest.mark.parametrize("name", SERVICES)
def test_hopeless_exits_are_not_restarted(name: str) -> None:
    (codes,) = settings(f"{name}.service", "RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} == FATAL


def test_the_sandbox_is_the_same_everywhere() -> None:
    parts = set()
    for name in SERVICES:
        text = (UNITS / f"{name}.service").read_text().partition(SANDBOX)[2]
        lines = text.splitlines()
        for own in OWN.get(name, ()):
            (at,) = [at for at, line in enumerate(lines) if line.startswith(own)]
            assert lines[at - 1].startswith("# "), "it says why"
            del lines[at - 1 : at + 1]
        parts.add("\n".join(lines))
    assert len(parts) == 1
    assert "NoNewPrivileges=yes" in parts.pop()


@pytest.mark.parametrize("name", SERVICES)
def test_router_and_monitor_are_users_of_their_own(name: str) -> None:
    wanted = name if name in ("midair-router", MONITOR) else "midair"
    assert settings(f"{name}.service", "User") == [wanted]


@pytest.mark.parametrize("path", sorted(UNITS.glob("*.socket")), ids=lambda path: path.name)
def test_sockets_outlive_a_restart_of_the_target(path: Path) -> None:
    assert settings(path.name, "PartOf") == []
    assert settings(path.name, "StopPropagatedFrom") == ["midair.target"]
    assert settings(path.name, "TriggerLimitIntervalSec") == ["0"]
