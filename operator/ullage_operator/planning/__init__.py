"""Plans the actions for a service from its spec and the observed state of the cluster.

Planning has no side effects. The `controller` package observes the cluster and applies the plan.
`ullage up` runs the planned pods as processes.
"""
