"""Executes step plans on one rank's device.

A runner runs the model, samples tokens and exchanges activations with other ranks. It computes the
plans it is given and never decides what to run. It must not depend on gRPC or on waiting requests.
"""
