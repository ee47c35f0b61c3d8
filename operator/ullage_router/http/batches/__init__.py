"""Serves OpenAI's Batch API, and sends the requests of batches through the application.

`ullage_router.batches` runs the batches.
"""
