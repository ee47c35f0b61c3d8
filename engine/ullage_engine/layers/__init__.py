"""The layers of a decoder, and the decoder that is built of them.

They compute with the weights that they are given. They know nothing of schedulers, of processes, or
of the source of the weights.
"""
