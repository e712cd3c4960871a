/* modes_names: who is called what, who wants to know, and who is told (docs/modes.md).
 *
 * The structure: one struct mode_name for each slot of a connection, in the routing segment; a hash
 *               of them and its links, derived.
 * Written by:   the router. The text is stored while the record is free, its word by redo (R5), in
 *               the step that tells the watchers.
 * Invariants:   no two used records have the same text. A used record's connection has a session
 *               with its uid.
 * A name that another client has: its port is asked whether that client is alive (names.c of the port).
 * Nothing is kept about it here: who asks for a name asks again until it is told. When clients have
 * credentials, whether both have the same is compared before that.
 * After a crash: the name is there and its watchers are told, or neither; then REF_READY, or
 *               REF_CLOSE, is handled again. A list of clients goes on after `listed`.
 */
#include "router/instruct.h"
#include "router/modes/modes.h"

#include "base/crash.h"
#include "base/put.h"

#define ENTRY_MAX (MODE_NAME_MAX + 96u) /* bytes of one client in a list */

static uint32_t *bucket_of(const struct router *rt, const char *name, uint32_t len)
{
    return &rt->modes->name_hash[index_hash(name, len) >> 13 & (MODES_BUCKETS - 1)];
}

static uint32_t length(const struct mode_name *n) { return mode_name_len(n->word); }

/* What lies behind the name and its @: nothing, or the organisation. */
static const char *organisation(const struct mode_name *n, uint32_t *ret_len)
{
    uint32_t bytes = mode_name_bytes(n->word), name = length(n);

    *ret_len = bytes > name ? bytes - name - 1 : 0;
    return n->text + name + 1;
}

uint32_t modes_find_name(const struct router *rt, const char *name, uint32_t len)
{
    for (uint32_t at = *bucket_of(rt, name, len); at; at = rt->modes->name_next[at - 1]) {
        const struct mode_name *n = &routing_names(rt->seg)[at - 1];

        if (length(n) == len && memcmp(n->text, name, len) == 0)
            return at - 1;
    }
    return ROUTER_NONE;
}

void modes_hash_name(struct router *rt, uint32_t conn)
{
    const struct mode_name *n = &routing_names(rt->seg)[conn];
    uint32_t *bucket = bucket_of(rt, n->text, length(n));

    rt->modes->name_next[conn] = *bucket;
    *bucket = conn + 1;
}

static void unhash_name(struct router *rt, uint32_t conn)
{
    const struct mode_name *n = &routing_names(rt->seg)[conn];
    uint32_t *at = bucket_of(rt, n->text, length(n));

    while (*at && *at - 1 != conn)
        at = &rt->modes->name_next[*at - 1];
    if (*at)
        *at = rt->modes->name_next[conn];
}

void modes_add_who(const struct router *rt, uint32_t conn, uint64_t uid, struct fields *f)
{
    const struct mode_name *n = &routing_names(rt->seg)[conn];

    modes_add_number(f, STATUS_FIELD_CLIENT, uid);
    if (conn < rt->seg->names_high && n->word & MODE_USED && n->uid == uid)
        modes_add_field(f, STATUS_FIELD_NAME, n->text, length(n));
}

static uint32_t type_len(const struct mode_name *n)
{
    const char *dot = memchr(n->text, '.', length(n));

    return dot ? (uint32_t)(dot - n->text) : length(n);
}

/* {"type":"T","instance":"I","client":N, perhaps "organisation":"O", and what `end` adds. */
static char *put_client(char *to, const struct mode_name *n, const char *end)
{
    uint32_t type = type_len(n), len = length(n), rest = len > type ? len - type - 1 : 0, of_len;
    const char *of = organisation(n, &of_len);

    to = mempcpy(stpcpy(to, "{\"type\":\""), n->text, type);
    to = mempcpy(stpcpy(to, "\",\"instance\":\""), n->text + len - rest, rest);
    to = put_number(stpcpy(to, "\",\"client\":"), n->uid);
    if (of_len)
        to = stpcpy(mempcpy(stpcpy(to, ",\"organisation\":\""), of, of_len), "\"");
    return stpcpy(to, end);
}

/* ---- kinds ---- */

static int takes(const char *text, uint32_t len, const char **ret, uint32_t *ret_len)
{
    *ret = text;
    *ret_len = len;
    return len && !memchr(text, '.', len);
}

int modes_take_kind(const char *subject, uint32_t len, struct kind *ret_kind)
{
    const uint32_t kind = sizeof MODE_KIND_PREFIX - 1, org = sizeof MODE_ORG_PREFIX - 1, infix = sizeof MODE_ORG_INFIX - 1;

    *ret_kind = (struct kind){.type = ""};
    if (len > org && memcmp(subject, MODE_ORG_PREFIX, org) == 0)
        return takes(subject + org, len - org, &ret_kind->organisation, &ret_kind->organisation_len);
    if (len <= kind || memcmp(subject, MODE_KIND_PREFIX, kind) != 0)
        return 0;
    const char *type = subject + kind, *end = subject + len, *dot = memchr(type, '.', len - kind);

    if (!dot)
        return takes(type, len - kind, &ret_kind->type, &ret_kind->type_len);
    return (uint32_t)(end - dot) > infix && memcmp(dot, MODE_ORG_INFIX, infix) == 0 &&
           takes(type, (uint32_t)(dot - type), &ret_kind->type, &ret_kind->type_len) &&
           takes(dot + infix, (uint32_t)(end - dot) - infix, &ret_kind->organisation, &ret_kind->organisation_len);
}

int modes_is_of_kind(const struct router *rt, uint32_t conn, const struct kind *kind)
{
    const struct mode_name *n = &routing_names(rt->seg)[conn];
    uint32_t of_len;

    if (conn >= rt->seg->names_high || !(n->word & MODE_USED))
        return 0;
    const char *of = organisation(n, &of_len);

    return (!kind->type_len || (type_len(n) == kind->type_len && memcmp(n->text, kind->type, kind->type_len) == 0)) &&
           (!kind->organisation_len ||
            (of_len == kind->organisation_len && memcmp(of, kind->organisation, of_len) == 0));
}

/* ---- watchers: subscriptions to MODE_CLIENTS_SUBJECT, a dot and a name ---- */

static uint32_t subject_of(const char *name, uint32_t len, char *to)
{
    char *end = mempcpy(stpcpy(to, MODE_CLIENTS_SUBJECT "."), name, len);

    return (uint32_t)(end - to);
}

/* Who is told, into modes.list; how many. Of a queue group one member, on a port that takes orders if there is one. */
static uint32_t list_watchers(struct router *rt, const char *subject, uint32_t len)
{
    const struct index_match *m = index_match(rt->index, subject, len, index_hash(subject, len));
    uint32_t plain = m->count < MODES_WATCHERS_MAX ? m->count : MODES_WATCHERS_MAX, *list = rt->modes->list;
    uint32_t groups = m->group_count < MODES_WATCHERS_EACH ? m->group_count : MODES_WATCHERS_EACH;
    uint32_t busy = groups ? rt->still | router_full(rt, MODES_WATCHERS_ROOM) : 0;

    rt->work += (plain + groups) / MODES_WORK_COMPARED;
    if (plain)
        memcpy(list, m->subs, (size_t)plain * sizeof(*list));
    for (uint32_t g = 0; g < groups; g++) {
        struct index_group *group = &m->groups[g];
        uint32_t first = index_group_pick(group), at = busy ? route_member(rt, group, first, ROUTER_NONE, busy) : first;

        list[plain + g] = group->subs[at != ROUTER_NONE ? at : first];
    }
    return plain + groups;
}

/* 0: there is no room for that in the ring of somebody who is to be told, and for an answer to `from`; nothing
 * was changed. */
static int tell_watchers(struct router *rt, uint32_t from, const struct mode_name *client, const char *event)
{
    char subject[MODE_NAME_MAX + 32], body[ENTRY_MAX];
    struct order_said head = {.subject_len = (uint16_t)subject_of(client->text, length(client), subject)};
    uint32_t count = list_watchers(rt, subject, head.subject_len), *list = rt->modes->list, ends[PORTS_MAX] = {0};

    head.body_len = (uint16_t)(put_client(body, client, event) - body);
    for (uint32_t i = 0; i < count; i++)
        ends[INDEX_SUB_PORT(list[i])]++;
    for (uint32_t port = 0; port < rt->conf.ports; port++) /* a full list takes most of a batch */
        if ((ends[port] || port == from) && !router_room(rt, port, 2 + ends[port] / MODES_WATCHERS_EACH))
            return 0;
    for (uint32_t port = 0, first = 0; port < rt->conf.ports; port++) { /* from here on: where those of each begin */
        uint32_t here = ends[port];

        ends[port] = first;
        first += here;
    }
    for (uint32_t i = 0; i < count; i++)
        rt->sorted[ends[INDEX_SUB_PORT(list[i])]++] = INDEX_SUB_SLOT(list[i]);
    for (uint32_t port = 0, at = 0; port < rt->conf.ports; port++)
        for (uint32_t n; at < ends[port]; at += n) {
            n = ends[port] - at < MODES_WATCHERS_EACH ? ends[port] - at : MODES_WATCHERS_EACH;
            instruct_status(rt, port, rt->sorted + at, n, &head, subject, "", "", body);
        }
    return 1;
}

/* ---- names come and go ---- */

/* If there is no room for the question now, who asks will ask again. */
static void ask_holder(struct router *rt, uint32_t holder, uint32_t from, const struct ref_ready *r)
{
    uint32_t port = (uint32_t)(routing_clients(rt->seg)[holder].word >> 32);

    if (!router_room(rt, port, 1))
        return;
    instruct_name_asked(rt, port, holder, routing_names(rt->seg)[holder].uid, from, r);
    CRASH(NAME_ASKED);
}

/* The holder has answered. Without room, the same goes for the answer. */
void modes_name_kept(struct router *rt, const struct ref_name_kept *r)
{
    if (r->asker_port >= rt->conf.ports || !router_room(rt, (uint32_t)r->asker_port, 1))
        return;
    instruct_conn(rt, (uint32_t)r->asker_port, ORDER_NAME_TAKEN, r->asker, r->asker_uid);
    rt->stats.names_refused++;
}

int modes_name(struct router *rt, uint32_t from, const struct ref_ready *r)
{
    struct mode_name *n = &routing_names(rt->seg)[r->conn];
    const char *at = memchr(r->name, '@', r->name_len);
    uint32_t name_len = at ? (uint32_t)(at - r->name) : r->name_len;

    if (routing_clients(rt->seg)[r->conn].uid != r->uid || r->name_len > MODE_NAME_MAX)
        return 1;
    if (rt->seg->names_high <= r->conn)
        rt->seg->names_high = r->conn + 1;
    if (n->word & MODE_USED) { /* said again after a crash of its port */
        instruct_conn(rt, from, ORDER_NAME_GIVEN, r->conn, r->uid);
        return 1;
    }
    uint32_t holder = modes_find_name(rt, r->name, name_len);

    if (holder != ROUTER_NONE) {
        ask_holder(rt, holder, from, r);
        return 1;
    }
    n->uid = r->uid;
    memcpy(n->text, r->name, r->name_len);
    uint64_t word = MODE_USED | (uint64_t)r->name_len << 8 | name_len;
    struct mode_name now = *n;

    now.word = word;
    if (!tell_watchers(rt, from, &now, ",\"event\":\"up\"}"))
        return rt->aside_now ? ROUTED_NO_ROOM : ROUTED_ASIDE;
    redo_put(&rt->redo, &n->word, word);
    rt->stepping = 1;
    instruct_conn(rt, from, ORDER_NAME_GIVEN, r->conn, r->uid);
    CRASH(NAME_GIVEN);
    router_commit_at(rt, from, router_at(rt, from, r)); /* handled again, it is told so again */
    modes_hash_name(rt, r->conn);
    return 1;
}

int modes_drop_name(struct router *rt, uint32_t from, const struct ref_close *r)
{
    struct mode_name *n = &routing_names(rt->seg)[r->conn];

    if (r->conn >= rt->seg->names_high || !(n->word & MODE_USED))
        return 1;
    if (!tell_watchers(rt, from, n, ",\"event\":\"down\"}"))
        return 0;
    unhash_name(rt, r->conn);
    redo_put(&rt->redo, &n->word, 0);
    rt->stepping = 1;
    CRASH(NAME_DROPPED);
    router_commit_at(rt, from, router_at(rt, from, r));
    return 1;
}

/* ---- who is there ---- */

/* Which records an answer about clients goes through: that of one name, or all from *at on; where they end. */
static uint64_t listed(const struct router *rt, const char *name, uint32_t len, uint64_t *at)
{
    uint32_t conn = len ? modes_find_name(rt, name, len) : ROUTER_NONE;

    if (!len)
        return rt->seg->names_high;
    if (conn == ROUTER_NONE || *at > conn)
        return 0;
    *at = conn;
    return conn + 1ULL;
}

/* A request to MODE_CLIENTS_SUBJECT, perhaps with a name. Pages of a JSON list, then the end. */
int modes_list_clients(struct router *rt, uint32_t from, const struct ref_message *r)
{
    const uint32_t prefix = sizeof MODE_CLIENTS_SUBJECT; /* with the dot */
    const char *name = r->text + prefix, *reply = ref_reply(r);
    uint32_t len = r->subject_len > prefix ? r->subject_len - prefix : 0;
    struct routing_in *in = rt->place;
    uint64_t at = in->listed, end = listed(rt, name, len, &at);
    index_sub sub = r->reply_len ? own_sub(rt, r->conn, reply, r->reply_len) : ROUTER_NONE;

    while (sub != ROUTER_NONE && at < end) {
        char page[MODES_PAGE_BYTES + ENTRY_MAX], *to = page;
        uint32_t slot = INDEX_SUB_SLOT(sub);

        for (; at < end && to < page + MODES_PAGE_BYTES; at++) {
            const struct mode_name *n = &routing_names(rt->seg)[at];

            rt->work++;
            if (!(n->word & MODE_USED))
                continue;
            rt->work += MODES_WORK_LEG;
            *to = to == page ? '[' : ',';
            to = put_client(to + 1, n, "}");
        }
        if (to == page)
            break;
        *to++ = ']';
        if (!router_room(rt, from, 2))
            return 0;
        instruct_status(rt, from, &slot, 1,
                        &(struct order_said){.subject_len = r->reply_len, .body_len = (uint16_t)(to - page)},
                        reply, "", "", page);
        redo_put(&rt->redo, &in->listed, at);
        CRASH(CLIENTS_PAGE);
        router_commit_at(rt, from, router_at(rt, from, r));
        if (rt->work > rt->work_until)
            return ROUTED_LATER;
    }
    if (!router_room(rt, from, 1))
        return 0;
    if (sub != ROUTER_NONE)
        modes_tell(rt, r->conn, reply, r->reply_len, STATUS_END, NULL);
    instruct_delete(rt, from, r->handle, 1);
    redo_put(&rt->redo, &in->listed, 0);
    return 1;
}
