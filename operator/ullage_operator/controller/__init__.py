"""The reconcile loop and its queue, the healer and the autoscaler.

The loop observes the cluster, plans by `planning`, and applies the plan. The healer and the
autoscaler act on the decisions of `policy`. This room reaches the cluster only through `kube`.
"""
