"""Measurements on the machines, each in a process of the run or in a child of one; none knows what is expected."""
