"""The router alone: its load generator, fake engines and the time of one decision."""
