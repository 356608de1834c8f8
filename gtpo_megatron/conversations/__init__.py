"""Conversations of several turns: messages, their tokens, and the environments that answer."""
