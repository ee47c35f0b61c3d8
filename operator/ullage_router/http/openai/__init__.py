"""OpenAI's API: request bodies, answers, server-sent events, and errors in OpenAI's envelope.

The folder knows the calls and answers of the pipeline. It does not know sockets or engines.
"""
