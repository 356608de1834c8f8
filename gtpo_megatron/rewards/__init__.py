"""Outcome rewards: functions of a response and its reference answer, run with limits."""
