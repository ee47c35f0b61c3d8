"""Places requests on engines: ladder, queue, load balancing, and pools scaled to zero.

The package acts on the decisions of `policy` and knows engines. It knows neither HTTP nor the
streams of answers.
"""
