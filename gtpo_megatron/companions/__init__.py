"""The commands beside training. No step needs them; ``cli``, ``launchers`` and recipes of studies import them."""
