"""Tracing deliveries: `midair trace`, and the tracer that writes run folders (docs/traces.md)."""
