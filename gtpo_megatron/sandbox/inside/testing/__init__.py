"""Tests in Python: their text, their names, pytest, and the reports of what became of them."""
