"""OpenAI's API: request bodies in, answers and server-sent events out, and errors in OpenAI's
envelope.

It knows the pipeline's calls and answers, and nothing of sockets or engines.
"""
