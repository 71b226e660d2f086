"""Tell the scheduler of Kubernetes what this node has cached."""
