"""Replays a trace of requests in virtual time, to predict how a service would serve it.

The router's admission and the engine's worker loop and scheduler run unchanged. This room owns what
they run on instead: a clock that jumps, a runner that takes as long as a fitted cost model says,
and connections that are function calls. It must not know torch.
"""
