int crash_arm(const char *point, uint32_t pass, const char *path);
const char *crash_point(uint32_t i);
