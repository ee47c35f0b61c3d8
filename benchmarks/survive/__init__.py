"""Shows what other clients see while memory runs out, next to other servers and gateways."""
