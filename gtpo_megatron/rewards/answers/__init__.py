"""Reads an answer as mathematics and compares two of them: text rules, numbers, structure, expressions."""
