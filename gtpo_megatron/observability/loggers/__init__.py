"""Loggers of other libraries: each a ``MetricSink`` (``observability/sinks.py``) that imports its library if chosen."""
