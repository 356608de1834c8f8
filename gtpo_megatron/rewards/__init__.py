"""Outcome rewards: functions from a response and its reference answer to a number, run behind a time limit."""
