int sockpos_read(int fd, uint64_t *ret_taken, uint64_t *ret_given);
