"""The server process: gRPC services, the request journal, and the supervisor of workers.

It never loads the model or imports torch, and it knows workers only by the messages of
`ullage_engine.protocol`.
"""
