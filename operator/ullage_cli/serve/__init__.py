"""`ullage serve`: makes a manifest for a model and this machine, and serves it as `ullage up` does.

`fit` and `decide` are pure. They know neither files nor processes.
"""
