"""More requests than engines can hold: an open loop, and refused clients that come back."""
