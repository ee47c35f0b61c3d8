"""OpenAI's API: request bodies, answers, server-sent events, and errors in OpenAI's envelope.

The package depends on the calls and answers of the pipeline, but on neither sockets nor engines.
"""
