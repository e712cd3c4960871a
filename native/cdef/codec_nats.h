#define NATS_SID_MAX ...
#define NATS_LINE_SLACK ...
#define NATS_LINE_MAX ...
#define NATS_ERRORS ...
enum nats_op { NATS_PUB, NATS_HPUB, NATS_SUB, NATS_UNSUB, NATS_PING, NATS_PONG, NATS_CONNECT, NATS_OK, NATS_INFO, ... };
enum nats_error { NATS_E_UNKNOWN_OP, NATS_E_PARSER, NATS_E_CONTROL_LINE, NATS_E_PAYLOAD, NATS_E_SUBJECT, NATS_E_SID, NATS_E_HEADERS, NATS_E_PUB_SUBJECT, ... };
enum nats_flag { NATS_FLAG_BAD_SUBJECT, NATS_FLAG_USUAL, ... };
struct nats_limits { uint32_t max_control_line; uint32_t max_payload; uint8_t pedantic; uint8_t headers; };
struct nats_frame {
    uint8_t op; uint8_t flags; uint16_t subject_len; uint16_t reply_len; uint16_t queue_len; uint16_t sid_len;
    uint32_t subject; uint32_t reply; uint32_t queue; uint32_t sid;
    uint32_t args; uint32_t args_len;
    uint32_t body; uint32_t header_len; uint32_t total_len;
    uint64_t max_msgs; uint64_t bytes;
    ...;
};
int nats_parse(const uint8_t *buf, uint64_t len, const struct nats_limits *limits, struct nats_frame *ret_frame);
const char *nats_error_text(int error);
int nats_subject_valid(const uint8_t *s, uint32_t len, int wildcards);
