"""A program in a process beside that of its tests, which see its objects through proxies."""
