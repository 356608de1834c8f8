"""Every command on inputs that somebody damaged, seeded: one line each, never a traceback."""
