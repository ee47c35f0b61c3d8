"""The server process: gRPC services, the request journal, and the supervisor of workers.

The server process never loads the model and never imports torch. The process communicates with
workers only through the messages that `ullage_engine.protocol` defines.
"""
