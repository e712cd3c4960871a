/* The table of crash points: CRASH_POINT(identifier, name, roles that pass it). */

/* redo.c: a step of several words */
CRASH_POINT(REDO_READY, "redo.ready", "connmgr router")         /* all pairs put, not committed */
CRASH_POINT(REDO_COMMIT, "redo.commit", "connmgr router")       /* committed, nothing applied */
CRASH_POINT(REDO_HALF, "redo.half", "connmgr router")           /* half of the words applied */
CRASH_POINT(REDO_APPLIED, "redo.applied", "connmgr router")     /* applied, log not cleared */
CRASH_POINT(REDO_CLEAR, "redo.clear", "connmgr router")         /* cleared */

/* batch.c: through the queues */
CRASH_POINT(BATCH_CLOSE, "batch.close", "connmgr router")       /* closed for sending */
CRASH_POINT(BATCH_TAKEN, "batch.taken", "connmgr router")       /* the kernel has it, `sent` not stored */
CRASH_POINT(BATCH_SENT, "batch.sent", "connmgr router")         /* `sent` stored */
CRASH_POINT(BATCH_EXPECT, "batch.expect", "connmgr router")     /* inbox cleared, nothing received */
CRASH_POINT(BATCH_RECEIVED, "batch.received", "connmgr router") /* received, not processed */

/* input.c: bytes from clients */
CRASH_POINT(INPUT_MOVE, "input.move", "connmgr")         /* unparsed bytes copied, place not stored */
CRASH_POINT(INPUT_BUFFER, "conn.buffer", "connmgr")      /* place stored, nothing received there */
CRASH_POINT(INPUT_RECEIVED, "input.received", "connmgr") /* the kernel gave the bytes, not parsed */
CRASH_POINT(INPUT_PARSED, "input.parsed", "connmgr")     /* references appended, not committed */
CRASH_POINT(INPUT_COMMITTED, "input.committed", "connmgr")
CRASH_POINT(CHAIN_MADE, "chain.made", "connmgr")         /* chunks reserved, frame not moved there */
CRASH_POINT(CHAIN_RECEIVED, "chain.received", "connmgr") /* part of a large frame received */
CRASH_POINT(CHAIN_WHOLE, "chain.whole", "connmgr")       /* all of it, not committed */

/* deliver.c, orders.c, arena.c: deliveries and letting go */
CRASH_POINT(COUNT_BASE, "count.base", "connmgr")                     /* old count kept, not for this batch */
CRASH_POINT(COUNT_STAMP, "count.stamp", "connmgr")                   /* kept for it, nothing counted yet */
CRASH_POINT(FLOW_APPLIED, "flow.applied", "connmgr")                 /* delivered as before, not committed */
CRASH_POINT(ORDERS_APPLIED, "orders.applied", "connmgr")             /* outputs appended, not committed */
CRASH_POINT(ORDERS_COMMITTED, "orders.committed", "connmgr")         /* committed, nothing relinquished */
CRASH_POINT(ORDERS_RELINQUISHING, "orders.relinquishing", "connmgr") /* some messages relinquished */
CRASH_POINT(ORDERS_RELINQUISHED, "orders.relinquished", "connmgr")   /* all of them */
CRASH_POINT(ORDERS_LATE, "orders.late", "connmgr")                   /* slots freed, batch not done */
CRASH_POINT(ORDERS_DONE, "orders.done", "connmgr")
CRASH_POINT(LEDGER_COMPLETE, "ledger.complete", "connmgr")           /* freed, owner not told */
CRASH_POINT(ARENA_TAKEN, "arena.taken", "connmgr")                   /* chunk opened */
CRASH_POINT(ARENA_CLOSED, "arena.closed", "connmgr")                 /* chunk closed, not looked at */

/* streams.c: envelopes, with a transport that has them */
CRASH_POINT(RAW_OPENED, "raw.opened", "connmgr")   /* taken and committed, the kernel still has the raw bytes */
CRASH_POINT(RAW_DROPPED, "raw.dropped", "connmgr") /* the kernel has dropped them, nothing is parsed */
CRASH_POINT(RAW_FIXED, "raw.fixed", "connmgr")     /* envelopes fixed, nothing of them is given to the kernel */

/* output.c: bytes to clients */
CRASH_POINT(OUTPUT_WRITTEN, "output.written", "connmgr")           /* the kernel took bytes, not recorded */
CRASH_POINT(OUTPUT_RELINQUISHED, "output.relinquished", "connmgr") /* bodies let go, not popped */
CRASH_POINT(OUTPUT_POP, "out.pop", "connmgr")                      /* popped, not reused */
CRASH_POINT(OUTPUT_DROP, "out.drop", "connmgr")                    /* a closed connection's output dropped */

CRASH_POINT(SLOW_CROWDED, "slow.crowded", "connmgr")               /* mark of a consumer set or cleared */

/* connmgr.c, subtable.c: connections and subscriptions */
CRASH_POINT(ADOPT_RECORDED, "adopt.recorded", "connmgr")   /* in the journal, table says ASSIGNED */
CRASH_POINT(ADOPT_ACTIVE, "adopt.active", "connmgr")       /* table says ACTIVE, router not asked */
CRASH_POINT(CONNECT_TAKEN, "connect.taken", "connmgr")     /* what a client says of itself committed, router not told */
CRASH_POINT(FAIL_COMMITTED, "fail.committed", "connmgr")   /* error in the output, not written */
CRASH_POINT(FINISH_COMMITTED, "finish.committed", "connmgr") /* FINISHING, the router not told of the end */
CRASH_POINT(FINISH_WRITTEN, "finish.written", "connmgr")   /* the kernel has all that it is owed, its socket is open */
CRASH_POINT(END_SHUTDOWN, "end.shutdown", "connmgr")       /* socket shut down, nothing recorded */
CRASH_POINT(END_COMMITTED, "end.committed", "connmgr")     /* CLOSING, router not told */
CRASH_POINT(ENDED_SUBS, "ended.subs", "connmgr")           /* router confirmed, sub slots freed */
CRASH_POINT(ENDED_RECORDED, "ended.recorded", "connmgr")   /* journal slot free, table not */
CRASH_POINT(SID_CELLS, "sid.cells", "connmgr")             /* the cells of a long sid written, subscription not committed */
CRASH_POINT(SUB_FREE, "sub.free", "connmgr")               /* a sub slot freed */

/* router.c, route.c, clients.c */
CRASH_POINT(PICK_BASE, "pick.base", "router")                  /* a member's old count kept, not for this step */
CRASH_POINT(PICK_STAMP, "pick.stamp", "router")                /* kept for it, nothing counted yet */
CRASH_POINT(ROUTE_STEP, "route.step", "router")                /* orders appended, not committed */
CRASH_POINT(ROUTE_COMMITTED, "route.committed", "router")      /* committed, not sent */
CRASH_POINT(ROUTE_PART, "route.part", "router")                /* part of a run routed, not committed */
CRASH_POINT(ROUTE_PIECE, "route.piece", "router")              /* a piece of a very long list committed */
CRASH_POINT(ASIDE_PUT, "aside.put", "router")                  /* a reference set aside, not committed */
CRASH_POINT(ASIDE_DONE, "aside.done", "router")                /* one that was set aside is done, and committed */
CRASH_POINT(LANE_MADE, "lane.made", "router")                  /* the lane of a port that is added made, its life not stored */
CRASH_POINT(LANE_BEGUN, "lane.begun", "router")                /* its life stored */
CRASH_POINT(CLIENT_OPENED, "client.opened", "router")         /* client stored, not answered */
CRASH_POINT(CLIENT_CLOSED, "client.closed", "router")         /* client gone, not confirmed */
CRASH_POINT(SUBSCRIBE_STORED, "routing.subscribe", "router")   /* subscription stored, step not committed */
CRASH_POINT(UNSUBSCRIBE_STORED, "routing.unsubscribe", "router") /* taken out, step not committed */

/* modes_route.c, modes_fanout.c, modes_spread.c, modes_settle.c, modes_names.c, modes_out.c */
CRASH_POINT(MODE_ASKED, "mode.asked", "router")                /* a request recorded and ordered, not committed */
CRASH_POINT(MODE_ASKED_ALL, "mode.asked_all", "router")        /* a fanout request was written to its recipients */
CRASH_POINT(MODE_GATHERED, "mode.gathered", "router")          /* legs of a request to very many taken, nobody told */
CRASH_POINT(MODE_ORDERED, "mode.ordered", "router")            /* some of them ordered, not committed */
CRASH_POINT(MODE_PIECE, "mode.piece", "router")                /* some of them ordered and committed */
CRASH_POINT(MODE_LEGS_FREED, "mode.legs_freed", "router")      /* some legs of one that ended freed */
CRASH_POINT(MODE_SPREADING, "mode.spreading", "router")        /* a piece of what goes to several topics, not committed */
CRASH_POINT(MODE_SPREAD, "mode.spread", "router")              /* a piece of what goes to several topics, or to a kind */
CRASH_POINT(MODE_SECTION, "mode.section", "router")            /* all that listen to one of several topics have it */
CRASH_POINT(MODE_SESSION_SAID, "mode.session_said", "router")  /* a message of a session was written */
CRASH_POINT(MODE_REPLIED, "mode.replied", "router")            /* a reply was written */
CRASH_POINT(MODE_COMMITTED, "mode.committed", "router")        /* one of these committed, not sent */
CRASH_POINT(MODE_UNPINNED, "mode.unpinned", "router")          /* a session ended by an UNSUB, which goes on */
CRASH_POINT(MODE_LEG_SETTLED, "mode.leg_settled", "router")    /* one of a gone responder's requests settled */
CRASH_POINT(MODE_REQUEST_SETTLED, "mode.request_settled", "router") /* one of a gone requester's */
CRASH_POINT(MODE_EXPIRED, "mode.expired", "router")            /* past its deadline, not committed */
CRASH_POINT(NAME_GIVEN, "name.given", "router")                /* name stored, watchers told, not committed */
CRASH_POINT(NAME_DROPPED, "name.dropped", "router")            /* a name was given up */
CRASH_POINT(CLIENTS_PAGE, "name.page", "router")               /* a page of the list, not committed */
CRASH_POINT(NAME_ASKED, "name.asked", "router")                /* the holder of a name is asked, not committed */
CRASH_POINT(NAME_QUESTION, "name.question", "connmgr")         /* its PING is appended, not committed */
CRASH_POINT(NAME_KEPT, "name.kept", "connmgr")                 /* it has answered, not committed */
CRASH_POINT(NAME_REPLACED, "name.replaced", "connmgr")         /* it has not, and was told; the name is not free */
CRASH_POINT(NAME_OPENED, "name.opened", "connmgr")             /* the name is given, not committed */
CRASH_POINT(NAME_REFUSED, "name.refused", "connmgr")           /* told that it is taken, router not asked to close */
