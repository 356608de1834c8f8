"""The processes that grade: a pool of workers, each under a supervisor, with limits per row and per batch."""
