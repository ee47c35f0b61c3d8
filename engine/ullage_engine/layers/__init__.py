"""The layers of a decoder, and the decoder that is built from them.

Layers use whatever weights they are given. They do not depend on the scheduler, on processes or on
where the weights come from.
"""
