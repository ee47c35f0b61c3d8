"""Load tests of any OpenAI server: throughput over latency, the knee, engines and cost.

The package sends requests with the client of `ullage_verify`. It imports neither the operator, the
router nor the engine.
"""
