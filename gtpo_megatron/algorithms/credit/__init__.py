"""From rewards and entropies to advantages, fixed before the first update."""
