"""A push: the plan of slices, both ends, and the transports between them."""
