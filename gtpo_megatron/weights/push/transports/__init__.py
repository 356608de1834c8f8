"""How bytes of a push travel; they know no names."""
