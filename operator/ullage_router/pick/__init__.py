"""Placing requests that clients send straight to engines."""
