"""Load tests any OpenAI-compatible server: throughput by latency, the knee, engines and cost.

The package sends requests with the HTTP client of `ullage_verify`. It imports neither the
operator, the router nor the engine.
"""
