"""The stages as Ray actors: placement, start, remote calls."""
