"""Small number formats of weight matrices: rounding to them, their layout, checkpoints of them."""
