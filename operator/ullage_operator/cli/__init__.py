"""The `ullage` command."""
