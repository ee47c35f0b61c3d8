"""The `ullage` command.

It parses arguments and prints; what it starts lives in the rooms below.
"""
