"""`midair dashboard`: the page about a trace run, or a comparison of several.

Spark and what draws are imported only when the command runs: a machine that only routes messages
needs neither them nor Java.
"""

from __future__ import annotations

import argparse
import html
import http.server
import json
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midair import arguments
from midair.errors import MidairError, MissingError
from midair.exits import Exit

if TYPE_CHECKING:
    from spark_jobs.latency_live import Live


def add_command(commands: Any) -> None:
    """Adds `dashboard` to the parser of `midair`."""
    it = commands.add_parser(
        "dashboard",
        help="report on the latencies of a trace run",
        description="Makes a page about a trace run (latencies over time, what each upgrade did, "
        "fairness, slowest messages), or compares several runs with the first. The page is one "
        "file that needs no network. Needs Java and: pip install 'midair[spark]'",
    )
    it.add_argument("runs", metavar="RUN_DIR", nargs="*", help="run folder; several: comparison")
    it.add_argument("--live", action="store_true", help="follow a run that is being written")
    it.add_argument(
        "--serve",
        metavar="PORT",
        type=arguments.port,
        help="serve the page on 127.0.0.1; 0: any free port",
    )
    it.add_argument("--again", action="store_true", help="make the report even if it is there")
    it.add_argument(
        "--check", action="store_true", help="only say whether what reports need is installed"
    )
    it.set_defaults(run=_dashboard)


def _dashboard(args: argparse.Namespace) -> int:
    from spark_jobs import session

    if not args.runs and not args.check:
        raise MidairError("which run? RUN_DIR is missing", Exit.USAGE)
    if args.live and len(args.runs) > 1:
        raise MidairError("--live takes one run", Exit.USAGE)
    for run in args.runs:
        # A path with a scheme is for Spark to look at.
        if not re.match(r"[a-z][a-z0-9+.-]+:", run) and not Path(run).is_dir():
            raise MissingError(f"{run}: no such run folder")
    session.check_installed("pyspark", "plotly")
    session.check_java()
    if args.check:
        return Exit.OK
    site = Site() if args.serve is not None else None
    if site is not None:
        site.begin(args.serve)
        print(f"serving on http://127.0.0.1:{site.port}/; stop: Ctrl-C", flush=True)
    try:
        code = _make(args, site)
        if site is not None:
            site.wait()
        return code
    except Exception as error:
        line = session.spark_line(error)
        if line is None:
            raise
        raise MidairError(line) from None
    finally:
        if site is not None:
            site.end()


def _make(args: argparse.Namespace, site: Site | None) -> int:
    from spark_jobs import compare_runs, latency_report, storage
    from spark_jobs.session import start

    if args.live:
        return _live(args.runs[0], site)
    code = Exit.OK
    if len(args.runs) > 1:
        spark = start("midair dashboard", runs=args.runs)
        out = storage.join(args.runs[-1], "_compare")
        result = compare_runs.compare(spark, args.runs, out, compare_runs.THRESHOLD)
        code = Exit.FAILED if result["slower"] else Exit.OK
        line, place = result["verdict"], storage.join(out, "compare.html")
    else:
        out = latency_report.default_out(args.runs[0])
        place = storage.join(out, "report.html")
        facts = None if args.again else _there(args.runs[0])
        if facts is None:
            spark = start("midair dashboard", runs=args.runs)
            facts = latency_report.make_report(spark, args.runs[0])
        line = facts["headline"]
    if site is not None:
        if Path(place).is_file():
            site.page = Path(place).read_text(encoding="utf-8")
        else:
            site.page = storage.read_text(start("midair dashboard", runs=args.runs), place)
    print(f"{line}\nsee {place}", flush=True)
    return code


def _there(run: str) -> dict[str, Any] | None:
    """What an earlier report says, if the run was complete then and is the same now."""
    from midair.trace import schema
    from spark_jobs import latency_report

    manifest = Path(run) / schema.MANIFEST
    report = Path(latency_report.default_out(run)) / "report.json"
    try:
        if report.stat().st_mtime_ns < manifest.stat().st_mtime_ns:
            return None
        facts = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.get("complete") else None


def _live(run: str, site: Site | None) -> int:
    from spark_jobs import dashboard, latency_live
    from spark_jobs.session import start

    def on_batch(live: Live) -> None:
        latency_live.told(live)
        show(live)

    def show(live: Live) -> None:
        if site is None:
            latency_live.write_page(live)
        elif (data := live.data()) is not None:
            site.data = json.dumps(data)
            if site.page is None:
                site.page = dashboard.page(data, f"Midair live: {data['facts']['run']}")

    live = latency_live.Live(start("midair dashboard"), run, on_batch=on_batch)
    if site is None:
        print(f"see {live.out}/live.html; it reloads itself; stop: Ctrl-C", flush=True)
    latency_live.follow(live)
    show(live)  # once more: the run is complete
    last = live.last()
    print("no records" if last is None else f"{last['records']:,} records, {last['late']:,} late")
    return Exit.OK


WAITING = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>Midair</title><p style="font: 16px system-ui">{}</p>"""


class Site:
    """One page, and the data of a live one, for browsers on this machine."""

    def __init__(self) -> None:
        self.page: str | None = None
        self.data: str | None = None
        self.port = 0
        self._server: http.server.ThreadingHTTPServer | None = None

    def begin(self, port: int) -> None:
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/":
                    waiting = WAITING.format(html.escape("Waiting for the first figures..."))
                    self._answer(site.page or waiting, "text/html; charset=utf-8")
                elif self.path == "/data.json" and site.data is not None:
                    self._answer(site.data, "application/json")
                else:
                    self.send_error(404)

            def _answer(self, text: str, kind: str) -> None:
                body = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Requests are nobody's business."""

        try:
            self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise MidairError(f"127.0.0.1:{port}: {error.strerror}", Exit.CANNOT_LISTEN) from None
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait(self) -> None:
        """Until Ctrl-C."""
        sys.stdout.flush()
        threading.Event().wait()

    def end(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
