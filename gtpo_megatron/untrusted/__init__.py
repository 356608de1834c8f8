"""Readers of untrusted text: every JSON, JSONL and YAML file is read by them."""
