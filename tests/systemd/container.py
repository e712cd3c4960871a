"""A machine with systemd, for one test run: this one's files, its own everything else.

The tree is an overlay over `/` whose changes are on a tmpfs, so what is installed and done in
it is gone with it. systemd-nspawn boots it. All of it (the mounts, nspawn, every process of the
container) lives in one mount namespace and one pid namespace, and those end with their first
process. What is left then are the mount point and empty cgroups. `guard.py` sees to both, also
when the test itself is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PATIENCE_S = 60.0
PREFIX = "/opt/midair"  # as in the units
# Of commands in the container: nothing of ours, which speaks of another machine.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
PACKAGES = "systemd-container python3-venv python3-dev gcc"

# In the namespaces: makes the tree, waits until something is installed in it, boots it.
# /opt is the tree's own meanwhile, so that a venv made there knows its path in the container.
SCRIPT = r"""
set -e
cd "$1"
mount -t tmpfs -o mode=0755 midair-test .
cd "$1"
mkdir upper work tree
mount -t overlay midair-test -o lowerdir=/,upperdir=upper,workdir=work tree
mount --bind tree/opt /opt
echo made
read -r _
umount /opt
exec systemd-nspawn -D tree --machine=midair-test --keep-unit --register=no --link-journal=no \
    --private-network --console=pipe -b systemd.unit=multi-user.target </dev/null
"""

Result = TypeVar("Result")


class ContainerError(Exception):
    """The container cannot be made, or a command in it failed."""


def eventually(
    condition: Callable[[], Result], what: str, patience_s: float = PATIENCE_S
) -> Result:
    """Waits until `condition()` is true, and returns it."""
    deadline = time.monotonic() + patience_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise ContainerError(f"not within {patience_s:g} s: {what}")
        time.sleep(0.02)
    return result


class Container:
    """One such machine. `make` it, install into it, `boot` it, `run` commands, `end` it."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="midair-systemd-"))
        self.log = tempfile.TemporaryFile(prefix="midair-systemd-", mode="w+")  # noqa: SIM115
        self.outer: subprocess.Popen[str] | None = None
        self.first = 0  # the first process of the namespaces, in our numbers
        self.leader = 0  # the container's systemd, in our numbers
        self.guard: subprocess.Popen[str] | None = None  # cleans up, whatever happens to us

    def make(self) -> None:
        """The namespaces and the tree."""
        if os.geteuid() != 0:
            raise ContainerError("a container needs root")
        for program in ("systemd-nspawn", "unshare", "nsenter"):
            if shutil.which(program) is None:
                raise ContainerError(f"no {program} here: apt-get install -y {PACKAGES}")
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
        self.outer = subprocess.Popen(
            [*words, "--propagation", "private", "bash", "-c", SCRIPT, "boot", str(self.base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self.outer.stdout is not None
        if self.outer.stdout.readline() != "made\n":
            self._fail("the tree was not made")
        (self.first,) = _children(self.outer.pid)
        cgroups = list(_make_cgroups(f"midair-test-{os.getpid()}"))
        self.guard = subprocess.Popen(
            [sys.executable, str(HERE / "guard.py"), str(self.first), str(self.base), *cgroups],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.guard.stdout is not None
        self.guard.stdout.readline()  # it will not miss our end now
        for path in cgroups:
            for pid in (self.outer.pid, self.first):
                Path(path, "cgroup.procs").write_text(str(pid))

    @property
    def tree(self) -> Path:
        """The container's files, seen from here."""
        return Path(f"/proc/{self.first}/root{self.base}/tree")

    def prepare(self, *words: str, **options: Any) -> None:
        """Runs a command before the boot, with the container's /opt."""
        enter = ["nsenter", "-t", str(self.first), "--mount", "--pid", "--wd=/", "--"]
        _checked([*enter, *words], **options)

    def boot(self) -> None:
        """Starts systemd in the tree and waits until it has started everything."""
        assert self.outer is not None
        assert self.outer.stdin is not None
        self.outer.stdin.write("\n")
        self.outer.stdin.flush()
        try:
            eventually(self._booted, "systemd has started in the container")
        except ContainerError as error:
            raise ContainerError(f"{error}\n{self._boot_report()}") from None

    def _booted(self) -> bool:
        assert self.outer is not None
        if self.outer.poll() is not None:
            self._fail("systemd-nspawn ended")
        self.leader = next(iter(_children(self.first)), 0)
        if not self.leader or _name_of(self.leader) != "systemd":
            return False
        # Not is-system-running: that is "starting" for as long as a service keeps dying.
        done = self.run("systemctl", "is-active", "multi-user.target", check=False)
        return done.stdout.strip() == "active"

    def _boot_report(self) -> str:
        """Why a boot may not have come to its end."""
        names = {pid: _name_of(pid) for pid in _children(self.first)}
        parts = [f"leader {self.leader}, children of nspawn {names}"]
        for words in (
            ("systemctl", "is-system-running"),
            ("systemctl", "--no-pager", "list-jobs"),
            ("systemctl", "--no-pager", "--failed"),
            ("journalctl", "--no-pager", "-n", "120"),
        ):
            done = self.run(*words, check=False)
            parts.append(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}")
        self.log.seek(0)
        return "\n".join([*parts, self.log.read()[-2000:]])

    def enter(self, *words: str) -> list[str]:
        """The command line that runs `words` in the container."""
        return ["nsenter", "-t", str(self.leader), "--all", "--wd=/", "--", *words]

    def enter_network(self, *words: str) -> list[str]:
        """The same with the container's network only: a client of what listens in it."""
        return ["nsenter", "-t", str(self.leader), "--net", "--", *words]

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container to its end."""
        return _checked(self.enter(*words), check=check, env=ENVIRONMENT)

    def systemctl(self, *words: str) -> None:
        self.run("systemctl", *words)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).stdout.strip()

    def journal(self, *words: str) -> str:
        return self.run("journalctl", "--no-pager", "-o", "short-monotonic", *words).stdout

    def end(self) -> None:
        """Ends everything and leaves nothing."""
        if self.guard is not None:
            _, errors = self.guard.communicate(timeout=PATIENCE_S)
            if self.guard.returncode != 0:
                raise ContainerError(f"not everything could be removed: {errors}")
        elif self.base.exists():
            self.base.rmdir()
        if self.outer is not None:
            self.outer.kill()
            self.outer.communicate()
        self.log.close()

    def _fail(self, what: str) -> NoReturn:
        self.log.seek(0)
        raise ContainerError(f"{what}: {self.log.read()[-4000:]}")


def install(container: Container) -> None:
    """Midair as its documentation says: a venv of the wheel, then the units."""
    tree = container.tree
    for wants in (tree / "etc/systemd/system").glob("*.wants"):
        shutil.rmtree(wants)  # what this machine has enabled is not wanted there
    for links in (tree / "etc").glob("rc?.d"):
        shutil.rmtree(links)
    (tree / "etc/fstab").write_text("")
    source = tree / "opt/midair-source"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [name for name in project["tool"]["setuptools"]["packages"] if "." not in name]
    for name in ("pyproject.toml", "setup.py", project["project"]["readme"], *packages):
        place = source / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            built = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "_midair.c")
            shutil.copytree(ROOT / name, place, ignore=built)
        else:
            shutil.copyfile(ROOT / name, place)
    # One that is below /home or /root would not be there for the services.
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if python is None:
        raise ContainerError(
            f"no python3 in /usr/local/bin or /usr/bin: apt-get install {PACKAGES}"
        )
    container.prepare(python, "-m", "venv", PREFIX)
    pip = (f"{PREFIX}/bin/pip", "--disable-pip-version-check")
    container.prepare(*pip, "wheel", "--no-deps", "-w", f"{PREFIX}/wheel", "/opt/midair-source")
    (wheel,) = (tree / PREFIX[1:] / "wheel").iterdir()
    container.prepare(*pip, "install", f"{PREFIX}/wheel/{wheel.name}[trace]")
    shutil.rmtree(source)
    container.prepare(str(ROOT / "systemd/install"), f"{container.base}/tree")


def add_drop_in(container: Container, unit: str, text: str) -> None:
    """A drop-in for a unit; before the boot."""
    path = container.tree / f"etc/systemd/system/{unit}.d/test.conf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _checked(
    words: list[str], *, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    if check and done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        raise ContainerError(f"{' '.join(words)}: code {done.returncode}: {said[-4000:]}")
    return done


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _make_cgroups(name: str) -> Iterator[str]:
    """A cgroup of that name below ours, in each hierarchy that systemd uses."""
    mounts = {"systemd": Path("/sys/fs/cgroup/systemd"), "": Path("/sys/fs/cgroup")}
    if Path("/sys/fs/cgroup/unified").is_dir():
        mounts[""] = Path("/sys/fs/cgroup/unified")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, hierarchy, own = line.split(":", 2)
        mount = mounts.get(hierarchy.removeprefix("name="))
        if mount is not None and (mount / "cgroup.procs").exists():
            path = mount / own.strip("/") / name
            path.mkdir()
            yield str(path)
