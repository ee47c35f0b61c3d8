"""The reconcile loop and its queue: observe, plan purely, apply thinly; and the healer and
autoscaler that call it.

It reaches the cluster only through kube.
"""
