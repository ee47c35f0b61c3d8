"""Executes step plans on one rank's device.

A runner runs the model, samples tokens and exchanges activations with other ranks. It executes the
plans that it is given and never decides what to run. It must therefore not depend on gRPC or on the
queue of waiting requests.
"""
