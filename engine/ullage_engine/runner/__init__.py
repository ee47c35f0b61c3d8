"""Executes step plans on one rank's device: runs the model, samples tokens and exchanges
activations with other ranks.

It computes the plans it is given and never decides what runs; it knows nothing of gRPC or of
requests that wait.
"""
