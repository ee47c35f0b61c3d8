"""What runs on tensors below the layers: attention over paged KV, expert products, the step's
arena, and the Triton kernels.

It knows plans and memory layouts, and nothing of layers, models' files or requests that wait.
"""
