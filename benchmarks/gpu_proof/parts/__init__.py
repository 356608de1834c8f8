"""The parts; each has ``run(report, sizes)``."""
