"""The execution of step plans on one rank's device.

A runner runs the model, samples tokens and exchanges activations with other ranks. It computes the
plans that it is given and never decides what runs. It must not know gRPC or requests that wait.
"""
