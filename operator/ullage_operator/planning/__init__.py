"""Plans what must be done for a service, from its spec and the observed cluster.

The plan is pure: `controller` observes the cluster before and applies the plan after. `ullage up`
runs the planned pods as processes.
"""
