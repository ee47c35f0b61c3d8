"""The console: a live page that shows the engines, the queue and decisions as they change.

The package contains the page's files, and sends events to the browsers that show the page. The
console observes the router, and sends requests like any other client. It does not influence the
router's decisions.
"""
