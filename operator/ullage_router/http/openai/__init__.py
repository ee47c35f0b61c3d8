"""OpenAI's API: request bodies, answers, server-sent events, and errors in OpenAI's envelope.

The package knows the calls and answers of the pipeline, but neither sockets nor engines.
"""
