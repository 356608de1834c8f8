"""``gtpo-megatron verify-resume``: compares a killed and resumed run with an uninterrupted one, bit for bit."""
