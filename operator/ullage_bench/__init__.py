"""Load-tests any OpenAI-compatible server.

The package measures throughput and latency at each load level, and finds the knee: the load
above which latency grows faster than throughput. From these it derives the number of engines that a
request rate needs, and the cost. The package sends requests with the HTTP client of
`ullage_verify`. It does not import the operator, the router or the engine.
"""
