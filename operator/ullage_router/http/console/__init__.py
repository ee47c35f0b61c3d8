"""The console: a live page of engines, queue and decisions, with its event stream.

The package has the files of the page, and sends the events to its readers. The console watches the
router, and sends requests like any other client. It does not influence the router's decisions.
"""
