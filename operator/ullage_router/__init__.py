"""The router of Ullage: predicts each request's bytes, decides where it may run, and streams the
answer back.

Its rooms stand one above the other (`docs/reasons/code-map.md`); it meets engines and the
operator only on the wire.
"""
