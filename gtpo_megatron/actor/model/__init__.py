"""The Megatron model of a rank: its configuration, its layers, and what they cost."""
