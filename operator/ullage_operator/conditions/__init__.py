"""What a service's status says: its conditions, and what is wrong with its pods.

It reads objects that it is given and changes nothing.
"""
