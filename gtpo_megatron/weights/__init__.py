"""Name tables, slicing plans and transports of weights. Free of Megatron, so that a vLLM process can import it."""
