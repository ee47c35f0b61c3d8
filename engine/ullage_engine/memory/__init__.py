"""Where every byte of a device goes."""
