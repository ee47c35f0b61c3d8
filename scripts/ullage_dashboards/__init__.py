"""Ullage's Grafana dashboards as plain data, and their JSON.

The dashboards depend on the names of metrics and recording rules, but not on the code that
measures.
"""
