"""The reconcile loop and its work queue, the healer and the autoscaler.

The loop observes the cluster, calls `planning`, and applies the plan. The healer and the autoscaler
carry out the decisions of `policy`. This package accesses the cluster only through `kube`.
"""
