"""Benchmarks of the router alone: load generator, fake engines and the time per decision."""
