"""Reads text that anybody may have written: every JSON, JSONL and YAML file that is opened goes through here."""
