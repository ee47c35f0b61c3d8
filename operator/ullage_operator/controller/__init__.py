"""The reconcile loop and its queue: observe, plan by `planning`, apply; and the healer and the
autoscaler, which act on the decisions of `policy`.

It reaches the cluster only through kube.
"""
