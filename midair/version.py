"""The one place the version is written."""

__version__ = "0.2.0"
# The first version with today's layouts of segments: from here there is no way back before it.
LAYOUTS_SINCE = "0.2.0"
