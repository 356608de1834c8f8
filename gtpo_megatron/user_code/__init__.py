"""Worker processes that run code which a user has written: reward functions, environments, agents."""
