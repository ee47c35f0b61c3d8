"""Grafana's dashboards of Ullage as plain data, and their JSON.

They know the names of metrics and of recording rules, and nothing of the code that measures.
"""
