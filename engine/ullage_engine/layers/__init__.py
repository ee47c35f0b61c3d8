"""The layers of a decoder and the decoder that is built of them.

They compute with weights they are given; they know nothing of schedulers, processes or where
weights came from.
"""
