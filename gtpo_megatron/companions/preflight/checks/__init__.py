"""The functions of the checks, by what they need: every machine, the layout of ranks, a whole step."""
