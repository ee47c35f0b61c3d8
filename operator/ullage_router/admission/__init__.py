"""Finds a place for each request: the ladder of degradations, the queue, load balancing, and waking
pools that were scaled to zero.

It acts on what policy decides and knows engines; it knows neither HTTP nor how answers are
streamed.
"""
