"""The process runtime: executes the operator's plan on this machine, without Kubernetes."""
