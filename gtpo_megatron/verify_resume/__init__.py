"""``gtpo-megatron verify-resume``: a killed and resumed run against an unbroken one, bit for bit."""
