"""Credit functions: advantages from rewards and entropies, computed before the first update."""
