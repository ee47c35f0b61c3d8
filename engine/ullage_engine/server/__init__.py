"""The server process: gRPC services, the request journal, and the supervisor of workers.

The server process never loads the model and never imports torch. It communicates with workers only
by the messages of `ullage_engine.protocol`.
"""
