"""PySpark jobs over latency traces."""
