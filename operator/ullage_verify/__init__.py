"""Checks what clients of an OpenAI-compatible server see under overload, large prompts and faults.

The package needs only the server's URL. It imports neither the operator, the router nor the engine.
"""
