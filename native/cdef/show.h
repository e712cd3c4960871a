void connmgr_resume(struct connmgr *cm, const struct stats *s);
uint32_t connmgr_show(struct connmgr *cm, struct stats *s, uint32_t from);
int connmgr_describe(struct connmgr *cm, struct stats *s, uint32_t slot, uint64_t uid,
                     const char *name, uint32_t name_len, const char *lang, uint32_t lang_len,
                     const char *version, uint32_t version_len);
void router_resume(struct router *rt, const struct stats *s);
void router_show(struct router *rt, struct stats *s);
