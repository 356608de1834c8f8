"""``gtpo-megatron preflight``: a recipe on the machines that will train it, before the run is paid for."""
