"""The one place the version is written."""

__version__ = "0.2.0"
# The nats-server that Midair's answers are compared with: what clients take it for (INFO, /varz).
NATS_LEVEL = "2.9.10"
# The first version with today's layouts of segments: from here there is no way back before it.
LAYOUTS_SINCE = "0.2.0"
