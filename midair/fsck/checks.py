"""What the checks of native/fsck.h mean: the rule each is about, how bad it is, and the words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from midair import names

if TYPE_CHECKING:
    from native.fsck import Raw

ERROR = "error"  # a rule is broken
WARNING = "warning"  # something is lost or stuck, and nothing else is harmed by it
NOTE = "note"  # allowed: a recovery, or the next turn, takes it up

PHASES = ("none", "opening", "open", "lingering", "closing")
STATES = ("free", "assigned", "active", "closed")
CHUNKS = ("free", "open", "closed", "chain")
FIELDS = ("magic", "kind", "layout", "fingerprint", "size")
MARKS = (
    *("connections", "subscriptions", "segments", "blocks", "cells", "subscriptions", "slots"),
    *("requests", "legs", "names"),
)


RESERVED = (
    *("the segment", "connection {}", "subscription {}", "slot {}", "chunk {}", "ring {}"),
    *("session {}", "routed subscription {}", "request {}", "leg {}", "name {}"),
)


@dataclass(frozen=True)
class Check:
    """What a check of native/fsck.h means. {0} to {5}: its numbers; see `_words` for the rest."""

    rule: str  # of native/README.md; two: of a journal and of the router's segment
    text: str
    alive: str = ERROR
    dead: str = ERROR


_RING = "{ring}, batch {1}: "
_CONN = "connection {0} (uid {1}): "
_SUB = "subscription {0} (epoch {1}): "
_ROUTED = "subscription {0} of connmgr {connmgr} (epoch {1}): "

CHECKS: dict[str, Check] = {
    "header": Check("S1", "{field} in the header is {1:#x}, expected {2:#x}"),
    "unfinished": Check("S2", "was never finished by the process that made it", NOTE, NOTE),
    "geometry": Check("S1", "its sizes and offsets do not fit together"),
    "high_mark": Check("S1", "{1} {mark} in use, there are {2}"),
    "redo_waits": Check(
        "J1 R1", "a committed step of {0} words waits to be finished", WARNING, NOTE
    ),
    "redo_bad": Check("J1 R1", "redo log of {0} words: pair {1} is at {2:#x}, outside"),
    "ring_tail": Check("B2", "{ring}: its tail is batch {1}, {2} bytes"),
    "ring_sent": Check("B2", "{ring}: batch {4} is sent, but {5} is still being filled"),
    "ring_span": Check("B2", "{ring}: being filled is {4}, sent is {5}: more than the ring holds"),
    "seq_ahead": Check("B3", "{inbox}: batch {4} is finished, but only {5} was sent"),
    "seq_behind": Check("B3", "{ring}: {4} are sent, {5} finished: more than the queue holds"),
    "seq_lost": Check("B3", "{ring}: {4} batches from {5} on are not in the queue, nor received"),
    "batch_header": Check("B2", _RING + "its header says batch {2} from {3}"),
    "record": Check("B1", _RING + "at byte {2} is no record (type {3})"),
    "inbox_gap": Check("B4", "{inbox}: batch {1} came after {2}"),
    "inbox_batch": Check("B4", "{inbox}, batch {1}: at byte {2} is no record (type {3})"),
    "in_at": Check("R4", "{inbox}: goes on at byte {1} after batch {2}, where no record begins"),
    "in_progress": Check("R4", "{inbox}: {1} recipients ordered of no message, after batch {2}"),
    "aside": Check("R7", "{inbox}: set aside from {1} to {2}, which is no ring"),
    "aside_entry": Check("R7", "{inbox}: set aside at {1}: no reference ({2} bytes, {3})"),
    "applied": Check("J5", "applied is {4}, done is {5}"),
    "applied_inbox": Check("J5", "batch {0} is applied and not done, but {1} is in the inbox"),
    "open_handle": Check("L2", "the list of recipients of {message} goes on, but it is freed"),
    "handle": Check("L3", _RING + "at byte {2} {3:#x} names no message"),
    "ref_dead": Check("L2", _RING + "the reference at byte {2} is to {message}, which is freed"),
    "order_dead": Check("L2", _RING + "the order at byte {2} is about {message}, which is freed"),
    "order_sub": Check("J6", _RING + "the order at byte {2} names subscription {3}, which is free"),
    "table_state": Check("T3", "slot {0}: there is no state {1}"),
    "table_connmgr": Check("T2", "slot {0} (uid {1}): there is no connmgr {2}"),
    "table_uid": Check("T1", "slot {0}: uid {1}, but the next to be given is {4}"),
    "uid_twice": Check("T1", "uid {0} is in slots {1} and {2}"),
    "table_alone": Check(
        "T3", "slot {0} (uid {1}): active, but its journal.{2} does not know it", ERROR, NOTE
    ),
    "table_assigned": Check("T4", "{4} connections are assigned and not taken up", NOTE, NOTE),
    "table_closed": Check("T3", "{4} closed slots wait to be freed", NOTE, NOTE),
    "conn_phase": Check("J1", _CONN + "phase {2:#x}"),
    "conn_table": Check(
        "T3", _CONN + "slot of the table is {table_state}, uid {2}, connmgr {table_connmgr}"
    ),
    "conn_buffer": Check("J2", _CONN + "its buffer is {2:#x}, outside the arena"),
    "conn_session": Check("J6", _CONN + "open, but the router has session {2} there"),
    "out_link": Check("J3", _CONN + "its output leads to segment {2} - 1, there are {4}"),
    "out_cycle": Check("J3", _CONN + "its output comes back to segment {2}"),
    "out_shared": Check("J3", _CONN + "segment {2} is also in the output of connection {3}"),
    "out_pos": Check("J3", _CONN + "segment {2} begins at {3}, what follows it at {4}"),
    "out_block": Check("J3", _CONN + "segment {2}: {5} bytes at {4} of block {3}, outside"),
    "out_overlap": Check("J3", _CONN + "segment {2} overlaps one before it in block {3}"),
    "block_shared": Check("J3", _CONN + "block {2} is also used by connection {3}"),
    "out_body": Check("J4", _CONN + "segment {2} is of {message}, which is freed"),
    "out_body_range": Check("J3", _CONN + "segment {2}: {5} bytes at {4} of {message}, outside"),
    "out_left": Check("J3", _CONN + "{phase}, with output left", WARNING, NOTE),
    "sub_flags": Check("J6", "subscription {0}: active and dying at once ({1:#x})"),
    "sub_conn": Check("J6", _SUB + "of connection {2}, which is none"),
    "sub_sid": Check("J6", _SUB + "a sid of {2} bytes"),
    "sub_cell": Check("J7", _SUB + "its sid goes on in slot {2} - 1, which cannot be (other: {3})"),
    "sub_twice": Check("J6", _SUB + "connection {2} has the same sid in subscription {3}"),
    "sub_unrouted": Check("R2", _SUB + "active for connection {2}, but unknown to the router"),
    "routed_free": Check("J6", _ROUTED + "active, but in the journal it is {2:#x}"),
    "routed_session": Check("R2", _ROUTED + "of uid {2}, but the session there is of uid {3}"),
    "routed_text": Check("R2", _ROUTED + "its text does not fit its cells (from cell {2} - 1)"),
    "cell_shared": Check("R2", _ROUTED + "cell {2} is also used by subscription number {3}"),
    "session_alone": Check("J6", "session {0} (uid {1}): journal.{2} has uid {3} there"),
    "request_session": Check("R5", "request {0}: of uid {1}, but the session there is of uid {2}"),
    "request_alone": Check("R5", "request {0} (uid {1}): nobody is asked for an answer"),
    "leg_request": Check("R5", "leg {0} (generation {1}): its request {2} is none"),
    "leg_session": Check("R5", "leg {0}: of uid {1}, but the session there is of uid {2}"),
    "name_session": Check("R5", "name of connection {0}: of uid {1}, the session there of uid {2}"),
    "name_twice": Check("R5", "connections {0} (uid {1}) and {2} have the same name"),
    "chunk_state": Check("A2", "chunk {0}: there is no state {1}"),
    "chunk_messages": Check("A1", "chunk {0} ({chunk}): {1} messages"),
    "chain_link": Check("A2", "chunk {0}: its chain leads to chunk {1}, which is {chunk}"),
    "chain_cycle": Check("A2", "chunk {0}: its chain comes back to chunk {1}"),
    "chain_shared": Check("A2", "chunk {1} is in the chains of chunks {0} and {2}"),
    "chain_orphan": Check("A3", "chunk {0} belongs to no chain any more", WARNING, NOTE),
    "free_live": Check("A2", "chunk {0} is free, but {message} in it is alive"),
    "word": Check("L1", "{message}: its word is {1:#x}"),
    "entry": Check("A1", "{message}: its entry points outside its chunk"),
    "leak": Check(
        "A1", "leaked message: {message} from connection {5}, word {4:#x}", WARNING, WARNING
    ),
    "release": Check("S1", "the version in the header is no text, or it was converted from {0}"),
    "reserved": Check("S1", "reserved words of {reserved} are not zero"),
    "table_peer": Check("T2", "slot {0} (uid {1}): no address, listener {2}, or transport {3}"),
    "conn_speaks": Check("J1", _CONN + "no protocol {2}, transport {3}, or end of its name"),
    "envelope": Check("J2", _CONN + "positions of its envelopes (transport {2}) do not fit"),
    "unknown": Check(
        "A1", "{4} messages may be in {5} batches in flight that cannot be read", NOTE, NOTE
    ),
}

# Where in `where` the handle of a message is, for those that have one.
_HANDLES = {"open_handle": 0, "word": 0, "entry": 0, "leak": 0, "free_live": 1}
# Where the state of a chunk is.
_CHUNK_STATES = {"chunk_messages": 2, "chain_link": 2}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    severity: str
    segment: str
    check: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.segment}: {self.text} ({self.rule})"


def describe(raw: Raw, alive: bool) -> Finding:
    """A finding in words."""
    check = CHECKS[raw.check]
    rules = check.rule.split()
    return Finding(
        check.alive if alive else check.dead,
        segment_name(raw.noun, raw.index),
        raw.check,
        rules[-1] if raw.noun == names.ROUTING else rules[0],
        check.text.format(*raw.where, **_words(raw)),
    )


def _words(raw: Raw) -> dict[str, str]:
    """What some of the numbers mean."""
    where = raw.where
    handle = where[_HANDLES.get(raw.check, 3)]
    source, generation, entry = handle >> 58, handle >> 32 & 0x3FFFFFF, handle & 0xFFFFFFFF
    router = raw.noun == names.ROUTING
    return {
        "connmgr": str(raw.index),
        "field": _one(FIELDS, where[0]),
        "mark": _one(MARKS, where[0]),
        "reserved": _one(RESERVED, where[0]).format(where[1]),
        "phase": _one(PHASES, where[2]),
        "chunk": _one(CHUNKS, where[_CHUNK_STATES.get(raw.check, 1)]),
        "table_state": _one(STATES, where[3] >> 32),
        "table_connmgr": str(where[3] & 0xFFFFFFFF),
        "ring": f"ring of orders for connmgr {where[0]}" if router else "ring of references",
        "inbox": f"inbox for connmgr {where[0]}" if router else "inbox",
        "message": f"message {entry} of arena.{source} (generation {generation})",
    }


def _one(of: tuple[str, ...], number: int) -> str:
    return of[number] if number < len(of) else f"unknown ({number})"


def segment_name(noun: str, index: int) -> str:
    """`journal.0`, `routing`."""
    return f"{noun}.{index}" if names.SEGMENTS[noun] else noun
