"""Metrics, their sinks, logs, timers, the live display, memory and profiling."""
