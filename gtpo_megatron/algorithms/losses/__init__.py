"""From current log-probs to a loss, and what of it depends on the whole batch."""
