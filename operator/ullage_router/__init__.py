"""The router of Ullage: predicts each request's memory, places it, and streams the answer.

The packages of the router are layered (`docs/reasons/code-map.md`). The router talks to engines and
to the operator only over the network.
"""
