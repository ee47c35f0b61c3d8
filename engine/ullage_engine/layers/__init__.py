"""The layers of a decoder, and the decoder that consists of these layers.

Layers compute with the weights that they are given. They do not depend on the scheduler, on
processes, or on the source of the weights.
"""
