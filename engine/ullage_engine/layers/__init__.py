"""Building blocks of models."""
