/* index_form: the forms of wildcard patterns, which bound what a match costs.
 *
 * The form of a pattern says which of its tokens are wildcards, and nothing else. A subject that is matched
 * meets, at each depth, at most one trie node of each form: its tokens are the pattern's where those are
 * literal. So a walk visits no more nodes than there are forms, whatever the subject and however many patterns.
 * A million patterns `device.N.*` have three forms; those of `(a|*)` twenty tokens deep have two million.
 *
 * Created by:   index_open(), with a root that has no token.
 * Written by:   trie nodes that come and go, in the index's one thread.
 * Invariants:   a form is there while a trie node has it; its beginnings are, too. forms_long counts those of
 *               more than INDEX_FORM_FREE tokens, and is at most INDEX_FORMS_MAX, unless a table was restored
 *               that holds more.
 * After a crash: gone with the process. See index_core.h.
 */
#include "router/index/index_core.h"

uint32_t form_take(struct index *ix, uint32_t parent, bool wild)
{
    struct form *p = &ix->forms[parent];
    uint32_t id = p->child[wild];

    if (!id) {
        bool counts = p->depth >= INDEX_FORM_FREE;

        if (counts && !ix->restoring && (ix->forms_long >= INDEX_FORMS_MAX || ix->forms_new >= ix->forms_left))
            return 0;
        if (!(id = slab_take(&ix->form_slab)))
            return 0;
        ix->forms[id] = (struct form){.parent = parent, .depth = (uint16_t)(p->depth + 1)};
        p->child[wild] = id;
        ix->forms_long += counts;
        ix->forms_new += counts;
    }
    ix->forms[id].tries++;
    return id;
}

void form_give(struct index *ix, uint32_t id)
{
    struct form *f = &ix->forms[id], *p = &ix->forms[f->parent];

    if (!id || --f->tries)
        return;
    p->child[p->child[1] == id] = 0;
    ix->forms_long -= f->depth > INDEX_FORM_FREE;
    slab_give(&ix->form_slab, id);
}
