"""The Ullage router predicts each request's memory, picks an engine, and streams the answer.

Its packages form layers, which `docs/reasons/code-map.md` describes. The router talks to engines
and to the operator only over the network.
"""
