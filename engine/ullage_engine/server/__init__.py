"""The server process: gRPC services, the request journal, and the worker supervisor.

The server process never loads the model and never imports torch. It communicates with workers only
through the messages defined in `ullage_engine.protocol`.
"""
