"""Functions that a model may call: told to it, forced on it, and read out of what it writes."""
