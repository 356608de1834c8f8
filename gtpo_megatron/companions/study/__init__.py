"""``gtpo-megatron study``: several algorithms, several seeds, one table."""
