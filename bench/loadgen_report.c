/*
 * The report: one JSON object on standard output with --json, otherwise one "name: value" line each.
 * And the ways to end early: one clear line on standard error and an exit code.
 *
 * Written by the mode that runs, once, at its end.
 * A crash leaves at most an unfinished line on standard output.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "loadgen.h"

static bool as_json, first_field;

void report_begin(const struct options *opt)
{
    as_json = opt->json;
    first_field = true;
    if (as_json)
        fputc('{', stdout);
    report_text("mode", opt->mode);
}

static void field(const char *name)
{
    if (as_json)
        printf("%s\"%s\": ", first_field ? "" : ", ", name);
    else
        printf("%-28s ", name);
    first_field = false;
}

static void field_end(void)
{
    if (!as_json)
        fputc('\n', stdout);
}

void report_text(const char *name, const char *value)
{
    field(name);
    if (!as_json) {
        fputs(value, stdout);
    } else {
        fputc('"', stdout);
        for (const unsigned char *p = (const unsigned char *)value; *p; p++) {
            if (*p == '"' || *p == '\\')
                printf("\\%c", *p);
            else if (*p < 32 || *p > 126)
                printf("\\u%04x", *p);
            else
                fputc(*p, stdout);
        }
        fputc('"', stdout);
    }
    field_end();
}

void report_count(const char *name, uint64_t value)
{
    field(name);
    printf("%llu", (unsigned long long)value);
    field_end();
}

void report_number(const char *name, double value)
{
    field(name);
    printf(value < 100 ? "%.6f" : "%.1f", value);
    field_end();
}

void report_null(const char *name)
{
    field(name);
    fputs(as_json ? "null" : "unknown", stdout);
    field_end();
}

void report_latency(const char *prefix, const struct histogram *h)
{
    static const struct {
        const char *name;
        double quantile;
    } rows[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p999", 0.999}};
    char name[64];
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        snprintf(name, sizeof name, "%s%s_us", prefix, rows[i].name);
        report_number(name, (double)histogram_quantile(h, rows[i].quantile) / 1e3);
    }
    snprintf(name, sizeof name, "%smax_us", prefix);
    report_number(name, (double)h->max / 1e3);
    snprintf(name, sizeof name, "%smean_us", prefix);
    report_number(name, h->count ? (double)h->sum / (double)h->count / 1e3 : 0);
}

void report_cpu(const struct cpu_meter *meter, uint64_t deliveries)
{
    if (meter->known && deliveries) {
        report_count("server_cpu_ns", meter->server_ns);
        report_number("server_cpu_ns_per_delivery",
                      (double)meter->server_ns / (double)deliveries);
    } else {
        report_null("server_cpu_ns");
        report_null("server_cpu_ns_per_delivery");
    }
    report_count("generator_cpu_ns", meter->own_ns);
    report_number("generator_cpu_ns_per_delivery",
                  deliveries ? (double)meter->own_ns / (double)deliveries : 0);
}

void report_server(const struct hub *hub)
{
    report_text("server_name", hub->server_name);
    report_text("server_version", hub->server_version);
}

void report_end(void)
{
    if (as_json)
        fputs("}\n", stdout);
    if (fflush(stdout) != 0)
        fail(EXIT_SERVER, "cannot write the report");
}

void fail(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fputs("loadgen: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(code);
}

void deadline_check(const struct options *opt, const char *doing)
{
    if (clock_ns() >= opt->deadline_ns)
        fail(EXIT_SERVER, "%s:%u did not finish within %g s: timed out while %s", opt->host, opt->port,
             opt->timeout_s, doing);
}

void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size ? size : 1);
    if (!memory)
        fail(EXIT_SERVER, "out of memory (%zu bytes)", count * size);
    return memory;
}
