"""The page of one or several runs: what is read, which figures are made of it, how it is served."""
