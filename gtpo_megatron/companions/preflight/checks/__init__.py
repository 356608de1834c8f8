"""The checks, by the room that they need: this machine, every machine, the layout of ranks, a whole step."""
