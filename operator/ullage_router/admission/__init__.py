"""Places requests on engines: ladder, queue, load balancing, and pools scaled to zero.

The package carries out the decisions of `policy` and depends on the engines. It depends on neither
HTTP nor the streams of answers.
"""
