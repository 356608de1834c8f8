"""Runs inside the sandbox, in a bare Python with the standard library only: given to it as text."""
