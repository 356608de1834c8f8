"""Runs programs that nobody trusts: in bubblewrap, by an HTTP service, or, if asked for, without protection."""
