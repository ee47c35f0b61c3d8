"""The Ullage engine: a server process that survives crashes of its worker processes."""
