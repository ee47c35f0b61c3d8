"""The process that never loads the model: gRPC services, the request journal, and the supervisor of
workers.

It never imports torch and knows workers only through the messages of protocol.
"""
