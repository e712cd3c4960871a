"""Where the configuration of an instance comes from: a file, and options that go before it.

`midair up` keeps it in the runtime directory, so that a manager which it becomes (succession.py)
can read the same again.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass

import msgspec

from midair import config, names
from midair.config import Config
from midair.errors import MidairError
from midair.process.runtime import Runtime

NAME = "source.json"


@dataclass(frozen=True)
class Source:
    """The command line of `midair up`. None: not given."""

    file: str | None = None  # an absolute path
    name: str | None = None
    host: str | None = None
    port: int | None = None
    connmgrs: int | None = None
    monitor: str | None = None
    log: str | None = None

    def load(self) -> Config:
        """The configuration as it is now. ConfigError: it is wrong."""
        conf = config.load(self.file)
        if self.name is not None:
            conf = conf.with_("server", name=names.check_instance(self.name))
        if self.host is not None or self.port is not None:
            host, port = config.split_address(conf.server.listen[0].address)
            host = host if self.host is None else self.host.strip("[]")
            port = port if self.port is None else self.port
            conf = conf.listening_on([config.join_address(host, port)])
        if self.connmgrs is not None:
            conf = conf.with_("connmgr", count=self.connmgrs)
        if self.monitor is not None:
            conf = conf.with_("monitor", listen=self.monitor)
        if self.log is not None:
            conf = conf.with_("log", file=self.log)
        return conf

    def load_again(self) -> Config:
        """The same for an instance that runs. MidairError: there is no file to read."""
        if self.file is None:
            raise MidairError("midair up was started without --config: there is no file to read")
        return self.load()

    def keep(self, runtime: Runtime) -> None:
        runtime.write(NAME, json.dumps(asdict(self)), 0o600)


def kept(runtime: Runtime) -> Source:
    """What the manager before us had; nothing, if it was of a release that kept nothing."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(runtime.read_own(NAME), type=Source)
    return Source()
