"""The Ullage engine: a server process, and worker processes whose crashes the server survives."""
