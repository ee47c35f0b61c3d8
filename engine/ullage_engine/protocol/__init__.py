"""The words that the server and worker processes share: requests, messages, step
plans and errors.

It is the lowest floor: plain data without torch, gRPC or any behaviour of either process.
"""
