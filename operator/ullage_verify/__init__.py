"""Checks of a running OpenAI server: what clients see under overload, large prompts and faults.

The package needs only the server's URL. It imports neither the operator, the router nor the engine.
"""
